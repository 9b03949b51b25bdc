"""
Does it converge? Loss by depth, how far each loop still moves a token, and which tokens settle when.

    python measure.py --ckpt=out/ckpt.pt                       # writes out/measure.json and out/measure.png
    python measure.py --ckpt=out/ckpt.pt --tokens=8192         # a quick look
    python measure.py --ckpt=out/ckpt.pt --data=data/other     # other text, the same tokenizer

Claims 1, 2, 3, 4 and 7 of "Per-Token Fixed-Point Convergence in Depth-Recurrent Transformers" (arXiv 2607.14427), each
figure beside the paper's. One pass over the loops of each batch measures everything; the same command writes the same
bytes. Beyond the tokens themselves, what is kept does not grow with them: sums, histograms and counts.
"""

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from tqdm import tqdm

import config
from model import kl_signal, state_signal
from prepare_data import Corpus, token_bytes
from sample import score


@dataclass
class Settings:
    ckpt: str = "out/ckpt.pt"    # a checkpoint of train.py
    data: str = ""               # folder of shards; empty: the one that the checkpoint was trained on
    tokens: int = 65536          # the first tokens of the validation split
    block_size: int = 0          # tokens in a sequence; 0: the checkpoint's context
    max_depth: int = 32          # loops to run
    cache_tokens: int = 4096     # of these, how many are also decoded one by one, to see what the small cache loses; 0: none
    batch_size: int = 8          # sequences at a time; changes nothing but time and memory
    device: str = ""             # "cuda", "cuda:1", "mps" or "cpu"; empty: the best that is there
    # There is no dtype: all is float32 without TF32. In bfloat16 two readouts of one state differ by a KL near 1e-3
    # through rounding alone, so that a converged token would seem to move for ever.

    def __post_init__(self):
        for name, least in (("tokens", 1), ("block_size", 0), ("cache_tokens", 0), ("max_depth", 2), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")


DEPTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)       # where the loss is measured, and at the training mean
EPS = (1e-2, 1e-3, 1e-4)                         # a token has converged when its KL falls below
HALTING = (("state", 0.3), ("state", 0.1), ("kl", 1e-2), ("kl", 1e-3))         # rules and eps under which the cache is measured
SHOWN = "0.001"                                  # the eps of the table and of the panel by token type
TOLERANCE = 0.002                                # nats: depths closer than this to the best count as equal to it

# arXiv 2607.14427 on FineWeb-Edu, in nats per token. Its eps, and so what its depths mean exactly, is not known.
PAPER = "arXiv 2607.14427, FineWeb-Edu, 135M class, training mean 8"
PAPER_LOSS = {1: 3.80, 3: 3.272, 8: 3.189}       # claims 1 and 5
PAPER_KL = {2: 3.9e-1, 16: 8.5e-6}               # claim 2, the mean
PAPER_MEDIAN, PAPER_MOVING = "6", "10%"          # claim 3: median depth, share still moving at the training mean


# ---------------------------------------------------------------------------------------------------------
# what is measured, and on which text

def load(path, data="", device="cpu"):
    """-> the checkpoint's model (float32, evaluation mode), the checkpoint, its corpus; or one line and exit code 2."""
    model, ckpt = config.load_model(path, device)
    folder, tokenizer = data or ckpt["settings"]["data"], ckpt["data"]["tokenizer"]
    try:
        corpus = Corpus(folder)
    except (ValueError, OSError) as error:
        config.fail(str(error))
    if (corpus.tokenizer, corpus.vocab_size) != (tokenizer, model.config.vocab_size):
        config.fail(f"{folder} holds {corpus.tokenizer} tokens ({corpus.vocab_size} ids), but {path} was trained on {tokenizer} "
                    f"({model.config.vocab_size} ids): name other --data, or prepare it with --tokenizer={tokenizer}")
    return model, ckpt, corpus


TYPES = ("whitespace", "punctuation", "number", "function_word", "content_word", "continuation")
WHITESPACE, PUNCTUATION, NUMBER, FUNCTION, CONTENT, CONTINUATION = range(len(TYPES))
TYPE_OF_BYTE = np.array([WHITESPACE if bytes([b]).isspace() else NUMBER if bytes([b]).isdigit() else PUNCTUATION for b in range(256)],
                        np.uint8)
# A word: a run of letters, with an English contraction at its end. Every byte of another alphabet is a letter, but for
# typographic quotes, dashes and spaces, which are first replaced by ASCII of the same length.
WORD = re.compile(rb"[a-z\x80-\xff]+(?:'+(?:[stdm]|re|ve|ll)(?![a-z\x80-\xff]))?", re.IGNORECASE)
TYPOGRAPHIC = ((re.compile(rb"\xe2\x80[\x98\x99]"), b"'''"), (re.compile(rb"\xe2\x80[\x80-\xbf]"), b"---"),
               (re.compile(rb"\xc2\xa0"), b"  "), (re.compile(rb"\xc2[\x80-\xbf]"), b"--"))
FUNCTION_WORDS = frozenset(b"""
    a an the this that these those each every either neither some any no none all both few many much more most less least
    several such other another same own enough half
    i me my mine myself you your yours yourself he him his himself she her hers herself it its itself we us our ours
    ourselves they them their theirs themselves one who whom whose which what whoever whatever
    somebody someone something anybody anyone anything nobody nothing everybody everyone everything
    about above across after against along among around as at before behind below beneath beside between beyond by despite
    down during except for from in inside into like near of off on onto out outside over past per since through throughout
    till to toward towards under until up upon via with within without
    and but or nor so yet if unless while whereas because although though than whether when where why how
    am is are was were be been being have has had having do does did doing can could may might must shall should will would ought
    not here there then now too very also just only even again ever never
    """.split())


def token_types(ids, pieces):
    """
    Ids (n,) of running text -> the type of each, (n,) indices into TYPES. pieces: the bytes of each id, see token_bytes.

    A token's first character that is not a space decides, in the text around it: at the start of a word the whole word
    says function or content, inside a word the token is a continuation; a digit is a number, whatever else is
    punctuation (also the underscore, so each part of snake_case is a word), and nothing but spaces is whitespace, as is
    the end of text. The rule knows no tokenizer: of bytes, a word's first letter is typed as the word, the rest continue it.
    """
    if len(ids) > 1 << 20:                       # bounds the memory; one word in so many tokens may be cut
        return np.concatenate([token_types(ids[i:i + (1 << 20)], pieces) for i in range(0, len(ids), 1 << 20)])
    parts = [pieces[i] or b"\n" for i in np.asarray(ids).tolist()]
    text = b"".join(parts)
    for pattern, ascii in TYPOGRAPHIC:
        text = pattern.sub(ascii, text)
    words = list(WORD.finditer(text))
    starts, ends = (np.array([word.span()[side] for word in words], np.int64) for side in (0, 1))
    functional = [word[0].lower().endswith((b"n't", b"n'''t")) or word[0].lower().partition(b"'")[0] in FUNCTION_WORDS
                  for word in words]
    edges = np.zeros(len(text) + 1, np.int8)
    edges[starts] += 1
    edges[ends] -= 1                             # two words never touch: each is as long as can be
    kind = TYPE_OF_BYTE[np.frombuffer(text, np.uint8)]                         # (bytes,)
    kind[edges.cumsum()[:-1] > 0] = CONTINUATION
    kind[starts] = np.where(functional, FUNCTION, CONTENT)
    token_ends = np.cumsum([len(part) for part in parts])
    token_starts = np.append(0, token_ends[:-1])
    seen = np.where(kind != WHITESPACE, np.arange(len(kind)), len(kind))
    seen = np.minimum.accumulate(seen[::-1])[::-1]                             # (bytes,) where the next non-space is
    decides = seen[token_starts]                                               # (n,)
    return np.where(decides < token_ends, kind[np.minimum(decides, len(kind) - 1)], WHITESPACE).astype(np.uint8)


# ---------------------------------------------------------------------------------------------------------
# measuring

class LogHistogram:
    """Mean and quantiles of positive numbers in fixed memory. A quantile is right within 1.2 %: half a bin."""
    LOW, HIGH, PER_DECADE = -20, 10, 100         # decades; the first bin also takes zero, and what lies below

    def __init__(self):
        self.sum, self.counts = 0.0, np.zeros((self.HIGH - self.LOW) * self.PER_DECADE, np.int64)

    def add(self, values):
        """values (n,) float64, finite, none negative."""
        self.sum += values.sum()
        with np.errstate(divide="ignore"):
            bins = np.floor((np.log10(values) - self.LOW) * self.PER_DECADE).clip(0, len(self.counts) - 1)
        self.counts += np.bincount(bins.astype(np.int64), minlength=len(self.counts))

    def quantile(self, q):
        """The smallest value that at least a share q does not exceed."""
        cumulative = self.counts.cumsum()
        i = int(np.searchsorted(cumulative, q * cumulative[-1]))
        return 10 ** (self.LOW + (i + 0.5) / self.PER_DECADE) if i else 0.0

    def summary(self):
        return {"mean": float(self.sum / self.counts.sum()), "median": self.quantile(0.5), "p90": self.quantile(0.9),
                "p99": self.quantile(0.99)}


def check_finite(what, values, loop, idx, first):
    """Numbers that are not finite (values (B, T, ...)) end the measuring: they must never count as converged."""
    if not values.isfinite().all():
        row, position = (~values.isfinite().reshape(*idx.shape, -1).all(-1)).nonzero()[0].tolist()
        raise FloatingPointError(f"the {what} not finite at loop {loop}, validation sequence {first + row}, position {position} "
                                 f"(token id {idx[row, position]}): this checkpoint cannot be measured")


@torch.inference_mode()
def measure(model, x, y, types, max_depth, batch_size):
    """
    Windows x, y (n, T) and their tokens' types (2, n, T), as read and as predicted, -> a dict of
        nats         {depth: sum of the cross-entropy}
        type_nats    (2, types), the same at the training mean, by type
        kl, change   {loop: LogHistogram} of KL(p_i || p_{i-1}) and of ||s_i - s_{i-1}|| / ||s_i||
        counts       (first or settled, eps, 2, types, max_depth + 2), tokens by depth; max_depth + 1 means never
    """
    device, mean_loops, eps = model.wte.weight.device, model.config.mean_loops, np.array(EPS)[:, None]
    nats = {depth: 0.0 for depth in sorted({*DEPTHS, mean_loops}) if depth <= max_depth}
    type_nats = np.zeros((2, len(TYPES)))
    kl_by_loop, change_by_loop = defaultdict(LogHistogram), defaultdict(LogHistogram)
    counts = np.zeros((2, len(EPS), 2, len(TYPES), max_depth + 2), np.int64)
    with tqdm(total=x.size * max_depth, unit=" tokens x loops", unit_scale=True, desc="measure", disable=None) as bar:
        for start in range(0, len(x), batch_size):
            idx, targets = (torch.from_numpy(w[start:start + batch_size]).long().to(device) for w in (x, y))
            kinds = types[:, start:start + batch_size].reshape(2, -1).astype(np.int64)           # (2, B * T)
            first = np.full((len(EPS), idx.numel()), max_depth + 1)            # (eps, B * T), the first loop below eps
            above = np.ones((len(EPS), idx.numel()), np.int64)                 # (eps, B * T), the last loop not below
            e = model.prelude(idx)                                             # (B, T, d)
            s = model.initial_state(e)                                         # (B, T, d)
            logits = None
            for i in range(1, max_depth + 1):
                before, s = s, model.loop_step(s, e)
                previous, logits = logits, model.readout(s)                    # (B, T, V)
                change = state_signal(s, before)                               # (B, T)
                check_finite("state is", s, i, idx, start)
                check_finite("logits are", logits, i, idx, start)
                check_finite("state change is", change, i, idx, start)
                change_by_loop[i].add(change.flatten().cpu().double().numpy())
                if i in nats:
                    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").cpu().double().numpy()
                    nats[i] += float(loss.sum())
                    if i == mean_loops:
                        type_nats += [np.bincount(kind, loss, len(TYPES)) for kind in kinds]
                if i > 1:
                    kl = torch.stack([kl_signal(a, b) for a, b in zip(logits, previous)])        # by row: less memory
                    check_finite("KL is", kl, i, idx, start)
                    kl = kl.flatten().cpu().double().numpy()                   # (B * T,)
                    kl_by_loop[i].add(kl)
                    below = kl < eps                                           # (eps, B * T)
                    first = np.where(below, np.minimum(first, i), first)
                    above = np.where(below, above, i)
                bar.update(idx.numel())
            for a, depths in enumerate((first, above + 1)):                    # settled: after the last loop not below
                for k, depth in enumerate(depths):
                    for role, kind in enumerate(kinds):
                        cells = np.bincount(kind * (max_depth + 2) + depth, minlength=counts[a, k, role].size)
                        counts[a, k, role] += cells.reshape(len(TYPES), max_depth + 2)
    return {"nats": nats, "type_nats": type_nats, "kl": kl_by_loop, "change": change_by_loop, "counts": counts}


@torch.inference_mode()
def cache_gap(model, x, y, max_depth, batch_size):
    """
    What generation loses by keeping the keys and values of each token's last loop only: cross-entropy over windows x, y
    (n, T) when tokens are decoded one by one over such a cache, less that of the parallel computation, in which loop i of
    a token sees loop i of those before it; at uniform depths, and under halting rules. -> a list of rows, and the largest
    difference of a token's loss when the decoder keeps all loops apart: that it computes the same is not to be believed.
    """
    device, mean_loops, rows = model.wte.weight.device, min(model.config.mean_loops, max_depth), []

    def parallel(rule, eps, depth):
        losses, depths = [], []
        for start in range(0, len(x), batch_size):
            idx, targets = (torch.from_numpy(w[start:start + batch_size]).long().to(device) for w in (x, y))
            logits, of_tokens = model.forward_halting(idx, rule, eps, depth) if rule else (model(idx, n_loops=depth)[0], torch.full_like(idx, depth))
            losses.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(idx).cpu())
            depths.append(of_tokens.cpu())
        return torch.cat(losses).numpy(), torch.cat(depths).numpy()

    ways = [(None, 0.0, depth) for depth in sorted({*DEPTHS, mean_loops}) if depth <= min(max_depth, 2 * mean_loops)] + [(*way, mean_loops) for way in HALTING]
    for rule, eps, depth in tqdm(ways, desc="cache", disable=None):
        (loss, depths), (cached_loss, cached_depths) = parallel(rule, eps, depth), score(model, x, y, rule, eps, depth)
        rows.append({"rule": rule or "uniform", "eps": eps, "max_depth": depth, "gap": float((cached_loss - loss).mean(dtype=np.float64)),
                     "loss": float(loss.mean(dtype=np.float64)), "mean_depth": float(depths.mean()),
                     "cached_loss": float(cached_loss.mean(dtype=np.float64)), "cached_mean_depth": float(cached_depths.mean())})
    apart = score(model, x, y, None, 0.0, mean_loops, copies=mean_loops)[0] - parallel(None, 0.0, mean_loops)[0]
    return rows, float(np.abs(apart).max())


def depth_summary(counts, mean_loops):
    """Tokens by depth, (max_depth + 2,) with those that never converged last, which count as max_depth -> their figures."""
    max_depth, n = len(counts) - 2, int(counts.sum())
    depth, cumulative = np.arange(max_depth + 2).clip(max=max_depth), counts.cumsum()
    return {"mean": float(counts @ depth / n),
            "median": int(depth[np.searchsorted(cumulative, 0.5 * n)]), "p90": int(depth[np.searchsorted(cumulative, 0.9 * n)]),
            "still_moving": float(counts[min(mean_loops, max_depth) + 1:].sum() / n),            # at the training mean
            "histogram": {**{str(d): int(counts[d]) for d in range(2, max_depth + 1)}, "never": int(counts[-1])}}


def report(raw, mean_loops, n_tokens, n_bytes):
    """What measure() found -> the content of measure.json, but for `meta`."""
    def depths(counts):                          # (first or settled, eps, max_depth + 2)
        return {f"{eps:g}": {name: depth_summary(counts[a, k], mean_loops) for a, name in enumerate(("first", "settled"))}
                for k, eps in enumerate(EPS)}

    loss = {depth: nats / n_tokens for depth, nats in raw["nats"].items()}
    types = {"read": {}, "predicted": {}}
    for role, by_type in enumerate(types.values()):
        for t, name in enumerate(TYPES):
            n = int(raw["counts"][0, 0, role, t].sum())
            if n:                                # a type that the text does not have is left out
                by_type[name] = {"tokens": n, "depth": depths(raw["counts"][:, :, role, t])}
                if mean_loops in loss:
                    by_type[name]["loss"] = float(raw["type_nats"][role, t] / n)
    return {"loss_by_depth": {str(d): nats for d, nats in loss.items()},
            "bits_per_byte_by_depth": {str(d): nats / math.log(2) / n_bytes for d, nats in raw["nats"].items()},
            "kl_by_loop": {str(i): histogram.summary() for i, histogram in raw["kl"].items()},
            "state_change_by_loop": {str(i): histogram.summary() for i, histogram in raw["change"].items()},
            "depth": depths(raw["counts"][:, :, 0].sum(2)),
            "token_types": types,
            "saturation_depth": min(d for d, nats in loss.items() if nats <= min(loss.values()) + TOLERANCE)}


# ---------------------------------------------------------------------------------------------------------
# showing

def print_tables(result, mean_loops):
    def row(*cells):
        print("".join(f"{cell:>11}" for cell in cells))

    def numbers(summary):
        return [f"{summary[key]:.2e}" for key in ("mean", "median", "p90", "p99")]

    print(f"\npaper: {PAPER}\n\nvalidation loss by depth; the paper's stays there to 32 loops (claim 1)")
    row("depth", "nats/token", "bits/byte", "paper")
    for depth, loss in result["loss_by_depth"].items():
        row(depth, f"{loss:.4f}", f"{result['bits_per_byte_by_depth'][depth]:.4f}", f"{PAPER_LOSS[int(depth)]:.3f}" if int(depth) in PAPER_LOSS else "")
    print("\nKL(p_i || p_{i-1}) in nats, and the state change ||s_i - s_{i-1}|| / ||s_i||, by loop (claim 2; paper: mean KL)")
    row("loop", "KL mean", "median", "p90", "p99", "paper", "change", "median", "p90", "p99")
    for loop, change in result["state_change_by_loop"].items():
        if int(loop) in DEPTHS:
            kl = numbers(result["kl_by_loop"][loop]) if loop in result["kl_by_loop"] else [""] * 4
            row(loop, *kl, f"{PAPER_KL[int(loop)]:.1e}" if int(loop) in PAPER_KL else "", *numbers(change))
    print(f"\ndepth at which the KL falls below eps: for the first time, or to stay there (settled); moving: the share that\n"
          f"comes after the training mean, {mean_loops}; the paper, whose eps is not known: median {PAPER_MEDIAN}, "
          f"moving {PAPER_MOVING} (claim 3)")
    row("eps", "", "mean", "median", "p90", "moving", "never")
    for eps, kinds in result["depth"].items():
        for kind, d in kinds.items():
            never = d["histogram"]["never"] / sum(d["histogram"].values())
            row(eps, kind, f"{d['mean']:.2f}", d["median"], d["p90"], f"{d['still_moving']:.1%}", f"{never:.1%}")
    print(f"\nsettled depth at eps {SHOWN} by token type; the paper: whitespace shallowest, content words deepest (claim 4)")
    for role, by_type in result["token_types"].items():
        print(f"{role:>16}", end="")
        row("tokens", f"loss at {mean_loops}", "mean", "median", "moving")
        for name, entry in by_type.items():
            d = entry["depth"][SHOWN]["settled"]
            print(f"{name.replace('_', ' '):>16}", end="")
            row(entry["tokens"], f"{entry['loss']:.4f}" if "loss" in entry else "", f"{d['mean']:.2f}", d["median"],
                f"{d['still_moving']:.1%}")
    if "cache" in result:
        print("\nwhat the cache of the last loop loses: text decoded token by token over it, less the parallel computation, in nats\n"
              f"(with the loops kept apart the decoder agrees with the parallel computation within {result['cache_check']:.0e} nats a token)")
        row("", "eps", "depth", "parallel", "depth", "decoded", "gap")
        for c in result["cache"]:
            row(c["rule"], f"{c['eps']:g}" if c["eps"] else "", f"{c['mean_depth']:.2f}", f"{c['loss']:.4f}", f"{c['cached_mean_depth']:.2f}",
                f"{c['cached_loss']:.4f}", f"{c['gap']:+.5f}")
    print(f"\nsaturation depth, the smallest within {TOLERANCE} nats of the best: {result['saturation_depth']}, trained with a mean of "
          f"{mean_loops}; the paper: 8 with a mean of 8, 4 with 4 (claim 7)")


def plot(result, mean_loops, title):
    """-> a figure of four panels."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
                         "grid.color": "#e8e8e8", "axes.axisbelow": True, "legend.edgecolor": "white", "axes.titlesize": 12})
    blue, orange = "#2563a8", "#e07b28"
    fig, ((loss_ax, signal_ax), (depth_ax, type_ax)) = plt.subplots(2, 2, figsize=(12, 8.4), layout="constrained")
    fig.suptitle(title, fontsize=11, color="#444444")
    loops = [int(i) for i in result["state_change_by_loop"]]

    loss = {int(d): nats for d, nats in result["loss_by_depth"].items()}
    saturation = result["saturation_depth"]
    loss_ax.plot(loss.keys(), loss.values(), "o-", color=blue, markersize=5)
    loss_ax.plot(saturation, loss[saturation], "o", color=orange, markersize=10, label=f"saturation: depth {saturation}")
    loss_ax.set(title="Loss by depth", xlabel="loops", ylabel="validation loss, nats per token", xscale="log")
    loss_ax.set_xticks(list(loss), map(str, loss), minor=False)
    loss_ax.minorticks_off()

    for name, key, color in (("KL(p$_i$ ‖ p$_{i-1}$), nats", "kl_by_loop", blue),
                             ("state change ‖s$_i$ − s$_{i-1}$‖ / ‖s$_i$‖", "state_change_by_loop", orange)):
        at = [int(i) for i in result[key]]
        mean, median, p90 = ([summary[q] for summary in result[key].values()] for q in ("mean", "median", "p90"))
        signal_ax.plot(at, mean, color=color, linewidth=2, label=name)
        signal_ax.fill_between(at, median, p90, color=color, alpha=0.2, linewidth=0)
    signal_ax.plot(*zip(*((i, kl) for i, kl in PAPER_KL.items() if i in loops)), "s", color=blue, markerfacecolor="white",
                   markersize=7, label="mean KL in the paper")
    signal_ax.set(title="What each loop still changes", xlabel="loop (line: mean; band: median to 90th percentile)", yscale="log")
    signal_ax.set_ylim(top=300)                                                # room for the legend

    most = max(loops) + 1                                                      # where those stand that never settle
    for (eps, kinds), color in zip(result["depth"].items(), ("#9ec5e8", blue, "#16324f")):
        histogram = kinds["settled"]["histogram"]
        share = np.array(list(histogram.values())) / sum(histogram.values())
        depth_ax.stairs(share, np.arange(1.5, most + 1), color=color, fill=color == "#9ec5e8", linewidth=2,
                        label=f"KL stays below {eps}: mean {kinds['settled']['mean']:.1f}")
    depth_ax.set(title="Where tokens settle", xlabel="settled depth, loops", ylabel="share of tokens", xlim=(1, most + 0.6))
    depth_ax.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1, decimals=0))

    types = [name for name in TYPES if any(name in by_type for by_type in result["token_types"].values())]
    for offset, (role, by_type), color in zip((-0.2, 0.2), result["token_types"].items(), (blue, orange)):
        shown = [(k + offset, by_type[name]["depth"][SHOWN]["settled"]) for k, name in enumerate(types) if name in by_type]
        type_ax.barh([k for k, _ in shown], [d["mean"] for _, d in shown], 0.38, color=color, label=f"token {role}")
        type_ax.plot([d["median"] for _, d in shown], [k for k, _ in shown], "|", color="black", markersize=11, markeredgewidth=2,
                     label="median" if role == "predicted" else None)
    type_ax.set_yticks(range(len(types)), [name.replace("_", " ") for name in types])
    type_ax.invert_yaxis()
    type_ax.set(title=f"Depth by token type (KL stays below {SHOWN})", xlabel="mean settled depth, loops")

    step = math.ceil(max(loops) / 8)
    signal_ax.set_xticks([1, *range(step, most, step)])
    ticks = range(step, most - step // 2, step)                                # none so close that it runs into "never"
    depth_ax.set_xticks([*ticks, most], [*map(str, ticks), "never"])
    for ax in (loss_ax, signal_ax, depth_ax, type_ax):
        ax.axvline(mean_loops, color="#777777", linestyle="--", linewidth=1.2, label=f"training mean, {mean_loops}", zorder=0)
        ax.legend(fontsize=10)
    return fig


def main():
    s = config.parse(Settings, __doc__)
    device = config.pick_device(s.device)
    torch.set_float32_matmul_precision("highest")                              # no TF32
    model, ckpt, corpus = load(s.ckpt, s.data, device)
    block_size, mean_loops = s.block_size or model.config.block_size, model.config.mean_loops
    if block_size > model.config.block_size:
        config.fail(f"--block_size={block_size} exceeds the checkpoint's context of {model.config.block_size}")
    if s.tokens < block_size:
        config.fail(f"--tokens={s.tokens} is less than one sequence: use at least {block_size}, or a smaller --block_size")

    json_path, png_path = (Path(s.ckpt).with_name(name) for name in ("measure.json", "measure.png"))
    config.check_writable(json_path, png_path)

    # the text, and the type of each token as read and as predicted
    try:
        x, y = corpus.windows("val", s.tokens, block_size)                     # (n, T) each
        pieces = token_bytes(corpus.tokenizer)
    except (ValueError, OSError) as error:
        config.fail(str(error))
    types = np.stack([token_types(w.ravel(), pieces).reshape(w.shape) for w in (x, y)])          # (2, n, T)
    n_bytes = int(np.array([len(piece) for piece in pieces])[y].sum())
    print(f"{s.ckpt}: step {ckpt['step']}, trained with {mean_loops} loops on average; {x.size:,} validation tokens of {corpus.name}, "
          f"{n_bytes:,} bytes, in sequences of {block_size}; {s.max_depth} loops, {device}, float32", flush=True)

    try:
        raw = measure(model, x, y, types, s.max_depth, s.batch_size)
        some = slice(max(1, s.cache_tokens // block_size) if s.cache_tokens else 0)
        cache = cache_gap(model, x[some], y[some], s.max_depth, s.batch_size) if s.cache_tokens else None
    except FloatingPointError as error:
        config.fail(str(error))
    except torch.OutOfMemoryError:
        config.fail(f"{device} has too little memory: try a smaller --batch_size than {s.batch_size}")
    result = report(raw, mean_loops, x.size, n_bytes)
    if cache:
        result["cache"], result["cache_check"] = cache
    result["meta"] = {**config.provenance(device), "dtype": "float32", "step": ckpt["step"], "config": ckpt["config"],
                      "data": corpus.identity, "trained_on": ckpt["data"], "seed": ckpt["settings"].get("seed"),
                      "tokens": x.size, "bytes": n_bytes, "block_size": block_size, "batch_size": s.batch_size,
                      "max_depth": s.max_depth, "cache_tokens": x[some].size, "eps": list(EPS), "saturation_tolerance": TOLERANCE}

    print_tables(result, mean_loops)
    text = json.dumps(result, indent=1, sort_keys=True, allow_nan=False) + "\n"
    figure = plot(result, mean_loops, f"step {ckpt['step']:,}, training mean {mean_loops} loops; {x.size:,} validation tokens of {corpus.name}")
    try:
        config.write_whole(json_path, lambda path: Path(path).write_text(text))
        config.write_whole(png_path, lambda path: figure.savefig(path, format="png", dpi=110))
    except OSError as error:
        config.fail(f"cannot write {json_path} and {png_path.name}: {error.strerror}")

    print()
    for depth, loss in result["loss_by_depth"].items():
        print(f"loss_depth_{depth}: {loss:.4f}")
    for loop in ("2", "8", "16", "32"):
        if loop in result["kl_by_loop"]:
            print(f"kl_loop_{loop}: {result['kl_by_loop'][loop]['mean']:.3e}")
    for eps, kinds in result["depth"].items():
        for kind, d in kinds.items():
            print(f"{kind}_depth_{eps}: mean {d['mean']:.2f} median {d['median']} p90 {d['p90']} still_moving {d['still_moving']:.4f}")
    for c in result.get("cache", ()):
        print(f"cache_gap_{c['rule']}_{c['eps'] or c['max_depth']:g}: {c['gap']:+.6f}")
    print(f"training_mean: {mean_loops}\nsaturation_depth: {result['saturation_depth']}\ntokens: {x.size}\n"
          f"json: {json_path}\npng: {png_path}")


if __name__ == "__main__":
    config.run(main)
