"""
How deep must each token go? Policies that choose depth, what they cost with their checks, and the time they really save.

    python allocate.py --ckpt=out/ckpt.pt                      # writes out/allocate.json and out/allocate.png
    python allocate.py --ckpt=out/ckpt.pt --tokens=16384       # a quick look
    python allocate.py --ckpt=out/ckpt.pt --schedule=4.94      # times skip with random exit depths of this mean
    python allocate.py --config=config/loop135m.py --schedule=4.94 --time_batch=1     # the same with random weights

Claims 5, 6 and 8 of "Per-Token Fixed-Point Convergence in Depth-Recurrent Transformers" (arXiv 2607.14427), each figure
beside the paper's, and beside the baseline that it leaves out: A0-min, the cheapest uniform depth that loses nothing.

    A0      the same depth for every token           A1      exit once a signal falls below a threshold, see model.Halting
    oracle  knows the loss, or the last distribution A2      exit once a trained router deems a change of argmax unlikely

One pass over the loops records what every policy looks at; a policy's frontier is then arithmetic on these arrays.
Thresholds and routers are chosen on sequences 0, 2, 4, ...; all figures are of sequences 1, 3, 5, ...
"""

import copy
import json
import statistics
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import config
from measure import TOLERANCE, TYPES, check_finite, load, token_types
from model import LoopConfig, LoopLM, accel_signal, kl_signal, state_signal
from prepare_data import token_bytes
from sample import score
from train import Settings as TrainSettings


@dataclass
class Settings:
    ckpt: str = "out/ckpt.pt"    # a checkpoint of train.py
    data: str = ""               # folder of shards; empty: the one that the checkpoint was trained on
    tokens: int = 65536          # the first tokens of the validation split
    block_size: int = 0          # tokens in a sequence; 0: the checkpoint's context
    max_loops: int = 0           # the most loops that a token may take; 0: the training mean
    batch_size: int = 8          # sequences at a time; changes nothing but time and memory
    device: str = ""             # "cuda", "cuda:1", "mps" or "cpu"; empty: the best that is there
    seed: int = 0                # of the routers, their training tokens, the bootstrap and the schedule
    # wall-clock; losses and depths are always float32 without TF32
    time_batch: int = 16         # sequences in one timed batch
    time_batches: int = 2        # timed batches
    repeats: int = 5             # rounds of A B A B ...; the median counts
    dtype: str = "float32"       # of the timed model: "float32" or "bfloat16"
    schedule: float = 0.0        # mean of random exit depths: times skip with them and does nothing else; 0: off
    config: str = ""             # with --schedule: random weights of this training configuration instead of a checkpoint

    def __post_init__(self):
        for name, least in (("tokens", 1), ("block_size", 0), ("max_loops", 0), ("batch_size", 1), ("seed", 0),
                            ("time_batch", 1), ("time_batches", 1), ("repeats", 1), ("schedule", 0)):
            if not least <= getattr(self, name) < 2**63:
                raise ValueError(f"{name} must be at least {least} and below 2**63, not {getattr(self, name)}")
        if self.dtype != "float32" and not self.schedule:
            raise ValueError("dtype other than float32 goes with schedule: the losses beside the times are those of float32")
        if self.config and not self.schedule:
            raise ValueError("config goes with schedule: random weights have no signals worth measuring, only a speed")


RULES = ("kl", "state", "accel")                 # of A1
HIDDEN = 64                                      # inner width of the two-layer router
ROUTER_TOKENS = 16384                            # routers are trained on so many tokens at most
L2 = 1e-2                                        # weight penalty of the linear router
ORACLE = 0.01                                    # nats above the last loop's loss that the oracle puts up with
THRESHOLDS, SHOWN = 401, 10                      # tried per policy; every tenth is kept as its frontier
EQUAL = range(2, 8)                              # mean depths at which policies are compared with A0

# arXiv 2607.14427 on FineWeb-Edu, training mean 8.
PAPER = "arXiv 2607.14427, FineWeb-Edu, 135M class, training mean 8"
PAPER_DEPTH = {"A1_kl": "4.94 (-38%)", "A2_linear": "7.99 (-0%)"}
PAPER_EQUAL = {3: f"{3.231 - 3.272:+.3f}", **dict.fromkeys(range(4, 8), "within .003")}       # A1 kl less A0
PAPER_BRACKET = "masking realises 0%, FLOP proxy 38%, best case with batching by depth 1.48x to 1.51x"


# ---------------------------------------------------------------------------------------------------------
# what every policy looks at

@torch.inference_mode()
def record(model, x, y, max_loops, batch_size, sample):
    """
    Windows x, y (n, T) -> a dict of (n, T, max_loops) arrays, and the states of the tokens in sample (n, T) bool,
    (max_loops, tokens, d). A token leaves at the first loop where its policy's signal is below a threshold:
        loss      nats                                       argmax   the likeliest token
        kl, state, accel   the signals of A1, see model.py; accel: the larger of two in a row, since it asks for two hits
        oracle    nats above the last loop's loss            convergence   KL(p_last || p_i)
    """
    r = {name: np.full((*x.shape, max_loops), np.inf, np.float32) for name in (*RULES, "loss", "convergence")}
    r["argmax"], features, device = np.zeros((*x.shape, max_loops), np.int32), [], model.wte.weight.device
    for start in tqdm(range(0, len(x), batch_size), desc="record", disable=None):
        rows = slice(start, start + batch_size)
        idx, targets = (torch.from_numpy(w[rows]).long().to(device) for w in (x, y))
        e = model.prelude(idx)                                                 # (B, T, d)
        s = [model.initial_state(e)]                                           # s[i] (B, T, d)
        for i in range(1, max_loops + 1):
            s.append(model.loop_step(s[-1], e))
            check_finite("state is", s[i], i, idx, start)
        last, logits, accel = model.readout(s[-1]), None, None                 # (B, T, V)
        for i in range(1, max_loops + 1):
            previous, logits = logits, model.readout(s[i]) if i < max_loops else last
            check_finite("logits are", logits, i, idx, start)
            seen = {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(idx),
                    "argmax": logits.argmax(-1), "state": state_signal(s[i], s[i - 1]),
                    "convergence": torch.stack([kl_signal(a, b) for a, b in zip(last, logits)])}     # by row: less memory
            if i > 1:
                seen["kl"] = torch.stack([kl_signal(a, b) for a, b in zip(logits, previous)])
                before, accel = accel, accel_signal(s[i], s[i - 1], s[i - 2])
                if i > 2:
                    seen["accel"] = torch.maximum(accel, before)
            check_finite("state change is", seen["state"], i, idx, start)
            for name, values in seen.items():
                r[name][rows, :, i - 1] = values.cpu().numpy()
        features.append(torch.stack(s[1:])[:, torch.from_numpy(sample[rows]).to(device)].cpu())
    r["oracle"] = np.maximum(r["loss"] - r["loss"][..., -1:], 0)
    return r, torch.cat(features, 1)


def will_change(argmax):
    """(..., loops) -> (..., loops) bool, the labels of A2: does the argmax differ from that of any later loop?"""
    step = np.append(argmax[..., :-1] != argmax[..., 1:], np.zeros_like(argmax[..., :1], bool), -1)
    return np.logical_or.accumulate(step[..., ::-1], -1)[..., ::-1]


def train_linear(x, y):
    """Logistic regression to convergence: features (m, d), labels (m,) -> a function (..., d) -> (...), P(label)."""
    x, y = x.double(), y.double()
    w = torch.zeros(x.shape[1] + 1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([w], max_iter=1000, tolerance_grad=1e-6, history_size=20, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(x @ w[:-1] + w[-1], y) + L2 / 2 * w[:-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    w = w.detach().float()
    return lambda states: (states @ w[:-1].to(states.device) + w[-1].item()).sigmoid()


def train_two_layer(x, y, steps=2000, batch=256, every=50):
    """d -> HIDDEN -> 1, same use: the weights that did best on an eighth of the tokens, kept aside."""
    net = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1), nn.Flatten(0))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    order, best = torch.randperm(len(x)), (float("inf"), None)
    aside, order = order[:(len(x) + 7) // 8], order[(len(x) + 7) // 8:]

    def loss(rows):
        return F.binary_cross_entropy_with_logits(net(x[rows]), y[rows].float())

    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(order[torch.randint(len(order), (batch,))]).backward()
        optimizer.step()
        if step % every == 0:
            with torch.no_grad():
                best = min(best, (loss(aside).item(), copy.deepcopy(net)), key=lambda pair: pair[0])
    net = best[1].requires_grad_(False)
    return lambda states: net.to(states.device)(states.flatten(0, -2)).sigmoid().view(states.shape[:-1])


def router_signals(model, x, features, labels, batch_size, seed):
    """
    A2: one router of each kind per loop, trained on features (loops, m, d) and labels (m, loops). -> {policy: (n, T, loops)},
    P(the argmax will change). The last loop needs no router: nobody runs on.
    """
    torch.manual_seed(seed)
    mean, std = features.mean(1, keepdim=True), features.std(1, keepdim=True).clamp_min(1e-6)     # (loops, 1, d)
    labels, routers = torch.from_numpy(labels.copy()), {"A2_linear": [], "A2_two_layer": []}
    for i in tqdm(range(len(features) - 1), desc="routers", disable=None):
        standard = (features[i] - mean[i]) / std[i]
        routers["A2_linear"].append(train_linear(standard, labels[:, i]))
        routers["A2_two_layer"].append(train_two_layer(standard, labels[:, i]))
    signals = {name: np.full((*x.shape, len(features)), np.inf, np.float32) for name in routers}
    mean, std = mean.to(model.wte.weight.device), std.to(model.wte.weight.device)
    with torch.inference_mode():
        for start in tqdm(range(0, len(x), batch_size), desc="route", disable=None):
            idx = torch.from_numpy(x[start:start + batch_size]).long().to(mean.device)
            e = model.prelude(idx)
            s = model.initial_state(e)
            for i in range(len(features) - 1):
                s = model.loop_step(s, e)
                for name, by_loop in routers.items():
                    signals[name][start:start + batch_size, :, i] = by_loop[i]((s - mean[i]) / std[i]).cpu().numpy()
    return signals


# ---------------------------------------------------------------------------------------------------------
# from signals to depths, losses and costs

def exit_depth(signal, threshold):
    """(..., loops) -> (...), the first loop whose signal is below the threshold, else the last."""
    return 1 + (~np.logical_or.accumulate(signal[..., :-1] < threshold, -1)).sum(-1)


def at_depth(values, depth):
    """(..., loops), (...) -> (...)."""
    return np.take_along_axis(values, depth[..., None] - 1, -1)[..., 0]


def flops(policy, depth, model_config, parts):
    """
    Mean FLOPs per token at depths (...), checks charged: A1 by kl reads out at every loop that a token runs, everybody
    else once. A router looks at every loop; so do state and accel, for next to nothing.
    parts: (prelude, loop, readout), see LoopLM.flops_per_token.
    """
    (prelude, loop, readout), d = parts, model_config.n_embd
    depth = float(np.asarray(depth, np.float64).mean())
    if policy == "A1_kl":
        return prelude + depth * (loop + readout)
    check = {"A2_linear": 2 * d, "A2_two_layer": 2 * HIDDEN * (d + 1)}.get(policy, 0)
    return prelude + depth * (loop + check) + readout


def thresholds(signal):
    """(...) -> thresholds that spread evenly over what the signal takes; from 0, nobody exits, to all exit at once."""
    finite = np.sort(signal[np.isfinite(signal)])
    spread = finite[np.linspace(0, len(finite) - 1, THRESHOLDS - 1).astype(int)] if len(finite) else []
    return sorted({0.0, *(float(f"{t:.3g}") for t in spread), *(float(f"{1.01 * t:.3g}") for t in spread[-1:])})


def choose(points, reference):
    """Of points measured on the calibration half the shallowest that matches A0 at the training mean, or None."""
    return min((p for p in points if p["loss"] <= reference + TOLERANCE), key=lambda p: p["mean_depth"], default=None)


def loosest(grid, matches, parts):
    """
    Bisection over ascending thresholds, the last first -> the index of the largest that `matches`, within so many parts of
    the grid; 0 if only grid[0] is left. That is 0, where nobody exits, and is not asked about.
    """
    low, high, at = 0, len(grid), len(grid) - 1
    while True:
        low, high = (at, high) if matches(grid[at]) else (low, at)
        if high - low <= max(1, len(grid) // parts):
            return low
        at = (low + high) // 2


def interval(difference, seed, draws=2000):
    """Paired bootstrap over sequences: differences (n, T) between two policies' losses -> 95 % interval of their mean."""
    of_sequence = difference.mean(-1, dtype=np.float64)                        # (n,)
    picks = np.random.default_rng(seed).integers(len(of_sequence), size=(draws, len(of_sequence)))
    return [float(q) for q in np.quantile(of_sequence[picks].mean(1), (0.025, 0.975))]


class Half:
    """Some of the sequences, `rows` of all: measures policies by the depths that they give to its tokens."""

    def __init__(self, recorded, rows, mean_loops, flops_of):
        self.signals = {name: values[rows] for name, values in recorded.items()}
        self.flops_of, self.reference = flops_of, self.signals["loss"][..., mean_loops - 1]          # (n, T)

    def depth(self, name, threshold):
        loss = self.signals["loss"]
        return np.full(loss.shape[:-1], threshold) if name == "A0" else exit_depth(self.signals[name], threshold)

    def point(self, name, threshold):
        depth = self.depth(name, threshold)
        return {"threshold": threshold, "mean_depth": float(depth.mean()), "flops_per_token": self.flops_of(name, depth),
                "loss": float(at_depth(self.signals["loss"], depth).mean(dtype=np.float64))}

    def against_reference(self, loss, depth, seed):
        """Of a run with these losses and depths (n, T): its figures, and the difference to A0 at the training mean."""
        return {"mean_depth": float(depth.mean()), "loss": float(loss.mean(dtype=np.float64)),
                "loss_difference": float((loss - self.reference).mean(dtype=np.float64)),
                "interval": interval(loss - self.reference, seed)}


def at_threshold(half, name, threshold, seed):
    """A policy's point, and how its loss compares with A0 at the training mean."""
    depth = half.depth(name, threshold)
    return half.point(name, threshold) | half.against_reference(at_depth(half.signals["loss"], depth), depth, seed)


@torch.inference_mode()
def run_halting(model, x, y, rule, eps, max_loops, mode, batch_size):
    """forward_halting over windows x, y (n, T) -> loss and depth, (n, T) each."""
    losses, depths, device = [], [], model.wte.weight.device
    for start in tqdm(range(0, len(x), batch_size), desc=f"{mode} {rule}", disable=None, leave=False):
        idx, targets = (torch.from_numpy(w[start:start + batch_size]).long().to(device) for w in (x, y))
        logits, depth = model.forward_halting(idx, rule, eps, max_loops, mode)
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(idx).cpu().numpy())
        depths.append(depth.cpu().numpy())
    return np.concatenate(losses), np.concatenate(depths)


# ---------------------------------------------------------------------------------------------------------
# wall-clock

@torch.inference_mode()
def wall_clock(batches, runs, baselines, repeats, flops_of):
    """
    {name: (policy, function of a batch (B, T) -> logits, depth)} -> {name: its figures}; the first of `baselines`, names of
    uniform runs, is the training mean. The bound is the ratio of FLOPs at the depths that the timed batches really took.
    """
    depth, rows = {}, {}

    def over_batches(name, function):
        depth[name] = [function(idx)[1] for idx in batches]
        if batches[0].device.type != "cpu":
            torch.accelerator.synchronize()

    seconds = config.interleaved({name: partial(over_batches, name, function) for name, (_, function) in runs.items()}, repeats)
    depth = {name: torch.stack([torch.as_tensor(d) for d in of_batches]).cpu().numpy() for name, of_batches in depth.items()}
    cost = {name: flops_of(policy, depth[name]) for name, (policy, _) in runs.items()}
    for name in runs:
        rows[name] = {"ms_per_1000_tokens": 1e6 * statistics.median(seconds[name]) / sum(idx.numel() for idx in batches),
                      "mean_depth": float(depth[name].mean()), "flops_per_token": cost[name]}
        for over, baseline in zip(("mean", "a0_min"), baselines):
            speedup, bound = config.speedup(seconds[baseline], seconds[name]), cost[baseline] / cost[name]
            rows[name][f"over_{over}"] = {"speedup": speedup, "bound": bound, "share_of_bound": speedup / bound}
    return rows


def scheduled_depths(mean, max_loops, shape, seed):
    """Exit depths drawn from the geometric distribution on 1..max_loops, P(k) ~ q^k, with q such that this is their mean."""
    k, low, high = np.arange(1, max_loops + 1), -50.0, 50.0                    # bisection for log q
    for _ in range(100):
        middle = (low + high) / 2
        p = np.exp(middle * k - max(middle * k))
        p /= p.sum()
        low, high = (middle, high) if p @ k < mean else (low, middle)
    return np.random.default_rng(seed).choice(k, shape, p=p)


def uniform(model, depth):
    return "A0", lambda idx: (model(idx, n_loops=depth)[0], depth)


def timed_batches(model, x, s):
    """Windows x (n, T) -> equal batches of ids on the model's device."""
    size = min(s.time_batch, len(x))
    batches = torch.from_numpy(x).long().to(model.wte.weight.device).split(size)[:s.time_batches]
    return [idx for idx in batches if len(idx) == size]


def timed_model(model, dtype):
    return model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)


# ---------------------------------------------------------------------------------------------------------
# showing

def row(first, *cells, width=13):
    print(f"{first:>20}" + "".join(f"{cell:>{width}}" for cell in cells))


def signed(difference, bounds=None):
    return f"{difference:+.4f}" + (f" [{bounds[0]:+.4f}, {bounds[1]:+.4f}]" if bounds else "")


def print_wall_clock(rows, what):
    compared = [over for over in ("over_mean", "over_a0_min") if over in next(iter(rows.values()))]
    print(f"\nwall-clock, {what};\nspeed-up over A0 at the training mean{' and over A0-min' if len(compared) > 1 else ''}, its bound in FLOPs, "
          f"share of the bound (claim 8; paper, against 8:\n{PAPER_BRACKET})")
    row("", "mean depth", "ms/1k tokens", *(cell for over in compared for cell in (over.replace("_", " ").replace("a0 ", "A0-"), "bound", "share")))
    for name, r in rows.items():
        cells = [f"{r['mean_depth']:.2f}", f"{r['ms_per_1000_tokens']:.1f}"]
        for over in compared:
            cells += [f"{r[over]['speedup']:.2f}x", f"{r[over]['bound']:.2f}x", f"{r[over]['share_of_bound']:.2f}"]
        row(name.replace("_", " "), *cells)


def print_times(rows):
    for name, r in rows.items():
        print(f"time_{name}: mean_depth {r['mean_depth']:.3f} ms_per_1000_tokens {r['ms_per_1000_tokens']:.2f} " + " ".join(
            f"{over} {r[over]['speedup']:.3f} bound {r[over]['bound']:.3f}" for over in ("over_mean", "over_a0_min") if over in r))


def print_tables(result, mean_loops):
    policies, a0 = result["policies"], result["policies"]["A0"]
    full = a0["frontier"][mean_loops - 1]
    print(f"\npaper: {PAPER}\n\nthe smallest mean depth that matches A0 at the training mean, {mean_loops} (loss {full['loss']:.4f}), within "
          f"{TOLERANCE} nats,\nand FLOPs per token, checks charged, against it and against A0-min (claims 5 and 6)")
    row("", "threshold", "mean depth", f"against {mean_loops}", "MFLOPs", f"against {mean_loops}", "to A0-min", "paper", "  loss difference")
    shown = {("A0-min" if name == "A0" else name.replace("_", " ")): (p["match"], PAPER_DEPTH.get(name, "")) for name, p in policies.items()}
    shown["oracle"] = policies["oracle"]["at"], ""         # its other thresholds match by looking at the target
    for name, (m, paper) in shown.items():
        if m:
            against_min = f"{m['flops_per_token'] / a0['match']['flops_per_token'] - 1:+.0%}"
            row(name, f"{m['threshold']:.3g}", f"{m['mean_depth']:.2f}", f"{m['mean_depth'] / mean_loops - 1:+.0%}",
                f"{m['flops_per_token'] / 1e6:.2f}", f"{m['flops_per_token'] / full['flops_per_token'] - 1:+.0%}", against_min, paper,
                "  " + signed(m["loss_difference"], m["interval"]) + " *" * (m["loss_difference"] > TOLERANCE))
        else:
            row(name, "no threshold matches")
    print("A1 as it runs with skip; A2 and oracles select only. *: matched where its threshold was chosen, but not where it is reported")
    names = [name for name in policies if name != "A0"]
    print("\nat equal mean depth: loss less that of A0 (claim 5; paper: A1 by kl)")
    row("mean depth", "A0", *(name.replace("_", " ").replace("oracle convergence", "converg.") for name in names), "paper")
    for depth in (d for d in EQUAL if d <= len(a0["frontier"])):
        cells = [policies[name]["equal_depth"][str(depth)] for name in names]
        row(depth, f"{a0['frontier'][depth - 1]['loss']:.4f}", *("" if c is None else f"{c:+.4f}" for c in cells), PAPER_EQUAL.get(depth, ""))
    print("\nwhat halting means: output selected, state and keys frozen, halted tokens skipped; each A1 rule at its threshold")
    row("", "mean depth", "loss", "  loss difference")
    for rule, modes in result["modes"].items():
        for mode, m in modes.items():
            row(f"{rule} {mode}", f"{m['mean_depth']:.3f}", f"{m['loss']:.4f}", "  " + signed(m["loss_difference"], m["interval"]))
        m, first = (policies[f"A1_{rule}"][key] for key in ("match", "select_match"))
        if m["stricter_steps"]:
            print(f"{'':>20}  ({rule}: for select alone {first['threshold']:.3g} had been enough, mean depth {first['mean_depth']:.2f}; "
                  f"where tokens halt for real it takes {m['threshold']:.3g})")
    print("\ndecoded: tokens one after the other, each over the last loop of those before; at that threshold, or a stricter one if need be")
    row("", "threshold", "mean depth", "loss", "  loss difference")
    for rule, m in result["decode"].items():
        row(f"{rule} decode", f"{m['threshold']:.3g}", f"{m['mean_depth']:.3f}", f"{m['loss']:.4f}",
            "  " + signed(m["loss_difference"], m["interval"]) + " *" * (m["loss_difference"] > TOLERANCE))
    for rule, roles in result["token_types"].items():
        print(f"\nmean depth by token type, A1 by {rule} at its threshold (claim 4; paper: whitespace shallowest, content words deepest)")
        row("", *(name.replace("_", " ") for name in TYPES), width=15)
        for role, by_type in roles.items():
            row(f"token {role}", *(f"{by_type[name]['mean_depth']:.2f}" if name in by_type else "" for name in TYPES), width=15)


def plot(result, mean_loops, title):
    """-> a figure of three panels: loss against mean depth, FLOPs and time."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.color": "#e8e8e8", "axes.axisbelow": True, "legend.edgecolor": "white", "axes.titlesize": 12})
    styles = {"A0": ("A0, uniform depth", "#16324f", "-", 3), "A1_kl": ("A1 kl", "#2563a8", "-", 1.8),
              "A1_state": ("A1 state", "#e07b28", "-", 1.8), "A1_accel": ("A1 accel", "#3c9a5f", "-", 1.8),
              "A2_linear": ("A2 linear router", "#a04a9c", "--", 1.5), "A2_two_layer": ("A2 two-layer router", "#c98bc6", "--", 1.5),
              "oracle": (f"oracle: {ORACLE} nats above the last loop", "#888888", "-", 1.2),
              "oracle_convergence": ("convergence oracle", "#888888", ":", 1.8)}
    policies, rows = result["policies"], result["wall_clock"]
    a0 = policies["A0"]["frontier"]
    fig, axes = plt.subplots(1, 3, figsize=(16, 5.6), layout="constrained", sharey=True)
    fig.suptitle(title, fontsize=11, color="#444444")
    for ax, key, scale in zip(axes, ("mean_depth", "flops_per_token"), (1, 1e6)):
        for name, (label, color, line, width) in styles.items():
            frontier, match = policies[name]["frontier"], policies[name]["match"]
            if name == "oracle":                                               # one depth and loss, not a choice of threshold
                at = policies["oracle"]["at"]
                ax.axvline(at[key] / scale, color=color, linestyle=line, linewidth=width, zorder=1,
                           label=f"oracle, within {ORACLE} nats" if scale == 1 else None)
                continue
            ax.plot([p[key] / scale for p in frontier], [p["loss"] for p in frontier], line, color=color, linewidth=width,
                    marker="o" if name == "A0" else None, markersize=6, label=label, zorder=4 if name == "A0" else 3)
            if match:
                ax.plot(match[key] / scale, match["loss"], "o", color=color, markersize=11, markeredgecolor="white", markeredgewidth=1.5, zorder=5)

    # time: uniform depth takes time linear in depth, between those that were measured
    time_ax = axes[2]
    measured = sorted((r["mean_depth"], r["ms_per_1000_tokens"]) for name, r in rows.items() if name.startswith("uniform"))
    depths = [p for p in a0 if measured[0][0] <= p["mean_depth"] <= measured[-1][0]]
    at = np.interp([p["mean_depth"] for p in depths], *zip(*measured))
    _, color, line, width = styles["A0"]
    time_ax.plot(at, [p["loss"] for p in depths], line, color=color, linewidth=width, label="A0 (line: between measured depths)")
    for depth, ms in measured:
        time_ax.plot(ms, a0[int(depth) - 1]["loss"], "o", color=color, markersize=8, zorder=4)
    for name, r in rows.items():
        mode, _, rule = name.partition("_")
        if rule in RULES:
            time_ax.plot(r["ms_per_1000_tokens"], result["modes"][rule][mode]["loss"], "o" if mode == "skip" else "X", markersize=11,
                         color=styles[f"A1_{rule}"][1], markeredgecolor="white", markeredgewidth=1.5, label=f"A1 {rule}, {mode}", zorder=5)

    losses = [p["loss"] for p in a0]
    reference = losses[mean_loops - 1]
    for ax, heading, xlabel in zip(axes, ("What a mean depth buys", "What it costs, checks charged", "What it takes"),
                                 ("mean depth, loops", "MFLOPs per token", "measured ms per 1,000 tokens")):
        ax.axhspan(reference - TOLERANCE, reference + TOLERANCE, color="#cfe3f5", alpha=0.6, linewidth=0, zorder=0)
        ax.set(title=heading, xlabel=xlabel)
    axes[0].set_ylabel("validation loss, nats per token")
    axes[0].set_ylim(reference - 4 * TOLERANCE, reference + max(12 * TOLERANCE, 1.5 * (losses[1] - reference)))
    axes[0].plot([], [], "o", color="#777777", markersize=10, label=f"matches depth {mean_loops} (band: ±{TOLERANCE})")
    axes[0].legend(fontsize=9.5)
    time_ax.legend(fontsize=9.5)
    return fig


# ---------------------------------------------------------------------------------------------------------

def write(path, result, figure=None):
    text = json.dumps(result, indent=1, sort_keys=True, allow_nan=False) + "\n"
    try:
        config.write_whole(path, lambda part: Path(part).write_text(text))
        if figure:
            config.write_whole(path.with_suffix(".png"), lambda part: figure.savefig(part, format="png", dpi=110))
    except OSError as error:
        config.fail(f"cannot write {path}: {error.strerror}")


def random_model(path, changes=()):
    """A model of a training configuration's shape, with random weights; changes: {field: value} to it."""
    values = {f.name: f.default for f in fields(TrainSettings)}
    for key, value in config.read_file(path, values).items():
        values[key] = config.check(TrainSettings, key, value, path)
    values |= dict(changes)
    try:
        return LoopLM(LoopConfig(**{f.name: values[f.name] for f in fields(LoopConfig)})).eval()
    except ValueError as error:
        config.fail(f"{path}: {error}")


def time_schedule(model, x, s, max_loops, dtype, about):
    """--schedule: `skip` with exit depths drawn beforehand against A0 at the training mean, and nothing else."""
    batches, parts, mean_loops = timed_batches(model, x, s), model.flops_per_token(x.shape[1]), model.config.mean_loops
    depths = torch.from_numpy(scheduled_depths(s.schedule, max_loops, batches[0].shape, s.seed)).to(batches[0].device)
    timed, name = timed_model(model, dtype), f"uniform_{mean_loops}"
    runs = {name: uniform(timed, mean_loops)}
    for rule in ("state", "kl"):                 # without and with a readout at every loop
        runs[f"skip_{rule}_scheduled"] = f"A1_{rule}", partial(timed.forward_halting, rule=rule, max_loops=max_loops, mode="skip", schedule=depths)
    rows = wall_clock(batches, runs, [name], s.repeats, lambda policy, depth: flops(policy, depth, model.config, parts))
    print_wall_clock(rows, f"scheduled exits of mean {s.schedule:g}; {len(batches)} x {tuple(batches[0].shape)}, {str(dtype)[6:]}, "
                     f"median of {s.repeats}")
    print()
    print_times(rows)
    if not s.config:
        path = Path(s.ckpt).with_name("allocate_scheduled.json")
        write(path, {"meta": about | {"schedule": s.schedule}, "wall_clock": rows})
        print(f"json: {path}")


def main():
    s = config.parse(Settings, __doc__)
    device = config.pick_device(s.device)
    dtype = config.pick_dtype(s.dtype or "float32", device)
    torch.set_float32_matmul_precision("highest")                              # no TF32
    if s.config:
        model, ckpt, corpus = random_model(s.config).to(device), None, None
    else:
        model, ckpt, corpus = load(s.ckpt, s.data, device)
    c = model.config
    block_size, mean_loops, max_loops = s.block_size or c.block_size, c.mean_loops, s.max_loops or c.mean_loops
    if block_size > c.block_size:
        config.fail(f"--block_size={block_size} exceeds the context of {c.block_size}")
    if max_loops < max(2, mean_loops):
        config.fail(f"--max_loops={max_loops} must be at least 2 and the training mean, {mean_loops}: all is compared with that depth")
    if s.schedule and not 1 <= s.schedule <= max_loops:
        config.fail(f"--schedule={s.schedule:g} must lie between 1 and {max_loops}, the most loops that a token may take")
    if s.tokens < 4 * block_size:
        config.fail(f"--tokens={s.tokens} is less than four sequences, two for each half: use at least {4 * block_size}, or a "
                    f"smaller --block_size")
    parts = model.flops_per_token(block_size)
    about = {**config.provenance(device), "config": {f.name: getattr(c, f.name) for f in fields(c)}, "block_size": block_size,
             "max_loops": max_loops, "seed": s.seed, "flops_per_token": dict(zip(("prelude", "loop", "readout"), parts)),
             "timed": {"repeats": s.repeats, "dtype": str(dtype)[6:]}}

    # the text: one half to choose on, the other to report
    if corpus is None:
        x = np.random.default_rng(s.seed).integers(c.vocab_size, size=(s.time_batch * s.time_batches, block_size))
        return time_schedule(model, x, s, max_loops, dtype, about)
    try:
        x, y = corpus.windows("val", s.tokens, block_size)                     # (n, T) each
        pieces = token_bytes(corpus.tokenizer)
    except (ValueError, OSError) as error:
        config.fail(str(error))
    if len(x) < 4:
        config.fail(f"{corpus.folder} has only {len(x)} validation sequences of {block_size}, but two for each half are needed: "
                    f"use a smaller --block_size")
    about |= {"step": ckpt["step"], "data": corpus.identity, "trained_on": ckpt["data"], "tokens": x.size, "batch_size": s.batch_size,
              "calibration": "sequences 0, 2, 4, ...", "reported": "sequences 1, 3, 5, ...", "dtype": "float32",
              "tolerance": TOLERANCE, "training_mean": mean_loops}
    held_out = x[1::2]
    if s.schedule:
        return time_schedule(model, held_out[:s.time_batch * s.time_batches], s, max_loops, dtype, about)
    config.check_writable(*(Path(s.ckpt).with_name(name) for name in ("allocate.json", "allocate.png")))
    print(f"{s.ckpt}: step {ckpt['step']}, trained with {mean_loops} loops on average; {x.size:,} validation tokens of {corpus.name} in "
          f"sequences of {block_size}: half to choose on, half to report; up to {max_loops} loops, {device}, float32", flush=True)

    # what the policies look at
    calibrating = np.flatnonzero(np.arange(x.size) // block_size % 4 == 0)     # routers learn on 0, 4, .., choose on 2, 6, ..
    sample = np.zeros(x.size, bool)
    sample[np.random.default_rng(s.seed).permutation(calibrating)[:ROUTER_TOKENS]] = True
    sample = sample.reshape(x.shape)
    try:
        recorded, features = record(model, x, y, max_loops, s.batch_size, sample)
    except FloatingPointError as error:
        config.fail(str(error))
    except torch.OutOfMemoryError:
        config.fail(f"{device} has too little memory: try a smaller --batch_size than {s.batch_size}")
    routed = router_signals(model, x, features, will_change(recorded["argmax"][sample]), s.batch_size, s.seed)
    signals = {"loss": recorded["loss"], **{f"A1_{rule}": recorded[rule] for rule in RULES}, **routed,
               "oracle": recorded["oracle"], "oracle_convergence": recorded["convergence"]}

    def flops_of(policy, depth):
        return flops(policy, depth, c, parts)

    # frontiers and matches
    calibration, report, unseen = (Half(signals, slice(first, None, step), mean_loops, flops_of) for first, step in ((0, 2), (1, 2), (2, 4)))
    policies, modes, decoded = {}, {}, {}
    for name in ("A0", *list(signals)[1:]):
        grid = range(1, max_loops + 1) if name == "A0" else thresholds(calibration.signals[name])
        points = [report.point(name, t) for t in grid]
        half = unseen if name in routed else calibration   # a router looks good on tokens that it was trained on
        match = choose([half.point(name, t) for t in grid], float(half.reference.mean(dtype=np.float64)))
        policies[name] = {"frontier": points[::1 if name == "A0" else SHOWN],
                          "match": match and at_threshold(report, name, match["threshold"], s.seed)}
        if name != "A0":
            by_depth = sorted((p["mean_depth"], p["loss"]) for p in points)
            losses = np.interp(EQUAL, *zip(*by_depth), left=np.nan, right=np.nan)
            policies[name]["equal_depth"] = {str(d): float(loss - policies["A0"]["frontier"][d - 1]["loss"]) if loss == loss else None
                                             for d, loss in zip(EQUAL, losses) if d <= max_loops}
    policies["oracle"]["at"] = at_threshold(report, "oracle", ORACLE, s.seed)

    # A1 for real: the threshold must match when halted tokens are skipped too, or a stricter one takes its place
    for rule in RULES:
        policy = policies[f"A1_{rule}"]
        if not policy["match"]:
            continue
        policy["select_match"], chosen = policy["match"], policy["match"]["threshold"]
        grid = thresholds(calibration.signals[f"A1_{rule}"])
        start = grid.index(chosen)

        def matches(eps, step, run, *how):
            loss = run(model, x[::step], y[::step], rule, eps, max_loops, *how)[0]
            return (loss - calibration.reference[::step // 2]).mean(dtype=np.float64) <= TOLERANCE

        at = loosest(grid[:start + 1], lambda eps: matches(eps, 2, run_halting, "skip", s.batch_size), 64)
        eps, steps = grid[at], start - at
        depth = report.depth(f"A1_{rule}", eps)
        modes[rule] = {"select": report.against_reference(at_depth(report.signals["loss"], depth), depth, s.seed)}
        for mode in ("freeze", "skip"):
            loss, depth = run_halting(model, held_out, y[1::2], rule, eps, max_loops, mode, s.batch_size)
            modes[rule][mode] = report.against_reference(loss, depth, s.seed)
        policy["match"] = {"threshold": eps, **modes[rule]["skip"], "flops_per_token": flops_of(f"A1_{rule}", depth),
                           "stricter_steps": steps}

        # the same for sample.py, tokens one after the other, each over the last loops of those before: slower, so on fewer
        eps = grid[loosest(grid[:at + 1], lambda eps: matches(eps, 4, score), 16)]
        if not eps:
            continue                                       # none matches: nothing is recommended
        loss, depth = score(model, held_out, y[1::2], rule, eps, max_loops)
        decoded[rule] = {"threshold": eps, **report.against_reference(loss, depth, s.seed), "flops_per_token": flops_of(f"A1_{rule}", depth)}

    # which tokens go deep
    types, by_rule = np.stack([token_types(w.ravel(), pieces).reshape(w.shape)[1::2] for w in (x, y)]), {}
    for rule in ("kl", "state"):
        if rule in modes:
            depth, by_rule[rule] = report.depth(f"A1_{rule}", policies[f"A1_{rule}"]["match"]["threshold"]), {}
            for role, kinds in zip(("read", "predicted"), types):
                by_rule[rule][role] = {name: {"tokens": int((kinds == t).sum()), "mean_depth": float(depth[kinds == t].mean())}
                                       for t, name in enumerate(TYPES) if (kinds == t).any()}

    # depth turned into time
    batches, timed, a0_min = timed_batches(model, held_out, s), timed_model(model, dtype), policies["A0"]["match"]["threshold"]
    runs = {f"uniform_{d}": uniform(timed, d) for d in sorted({1, a0_min, mean_loops})}
    for mode, rule in (("freeze", "state"), *(("skip", rule) for rule in RULES)):
        if rule in modes:
            eps = policies[f"A1_{rule}"]["match"]["threshold"]
            runs[f"{mode}_{rule}"] = f"A1_{rule}", partial(timed.forward_halting, rule=rule, eps=eps, max_loops=max_loops, mode=mode)
    rows = wall_clock(batches, runs, [f"uniform_{mean_loops}", f"uniform_{a0_min}"], s.repeats, flops_of)

    about["timed"] |= {"batches": len(batches), "shape": list(batches[0].shape)}
    result = {"policies": policies, "modes": modes, "decode": decoded, "token_types": by_rule, "wall_clock": rows, "meta": about}
    print_tables(result, mean_loops)
    print_wall_clock(rows, f"{len(batches)} x {tuple(batches[0].shape)}, {str(dtype)[6:]}, median of {s.repeats}")
    path = Path(s.ckpt).with_name("allocate.json")
    write(path, result, plot(result, mean_loops, f"step {ckpt['step']:,}, training mean {mean_loops} loops; {held_out.size:,} "
                                                 f"held-out tokens of {corpus.name}"))

    print()
    for name, policy in policies.items():
        if policy["match"]:
            print(f"{'A0_min' if name == 'A0' else name}: " + " ".join(f"{key} {policy['match'][key]:.6g}" for key in
                  ("threshold", "mean_depth", "loss", "loss_difference", "flops_per_token")))
    for rule, m in decoded.items():
        print(f"decode_{rule}: " + " ".join(f"{key} {m[key]:.6g}" for key in ("threshold", "mean_depth", "loss", "loss_difference", "flops_per_token")))
    print_times(rows)
    print(f"training_mean: {mean_loops}\ntokens: {x.size}\njson: {path}\npng: {path.with_suffix('.png')}")


if __name__ == "__main__":
    config.run(main)
