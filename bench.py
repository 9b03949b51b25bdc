"""
How fast is it? Ratios within a round of A B A B, medians over the rounds; run nothing else meanwhile.

    python bench.py train                                                          # one step of config/tiny.py, eager and compiled
    python bench.py train --vs=nanogpt:../nanoGPT/model.py                         # beside a public peer of equal unrolled depth
    python bench.py skip --config=config/loop135m.py --schedule=4.94               # scoring, random weights, drawn depths of this mean
    python bench.py decode --ckpt=out/ckpt.pt                                      # generation, lockstep and continuous
    python bench.py decode --config=config/loop135m.py --schedule=4.94
    python bench.py gpu                                                            # all that a new GPU should be asked
"""

import copy
import gc
import importlib
import json
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

import config
import train as trainer
from allocate import flops, random_model, scheduled_depths
from measure import load
from model import Halting
from sample import Decoder, score, threshold


@dataclass
class Settings:
    ckpt: str = "out/ckpt.pt"    # a checkpoint of train.py
    config: str = ""             # random weights of this training configuration instead
    data: str = ""               # folder of shards; empty: the one that the checkpoint was trained on
    device: str = ""             # "cuda", "cuda:1", "mps" or "cpu"; empty: the best that is there
    dtype: str = ""              # "float32" or "bfloat16"; empty: as training chooses it, for `decode` and `skip` float32
    repeats: int = 9             # rounds of A B A B ...; the median counts
    seed: int = 0                # of random weights, their text and the schedule
    # train and skip
    batch_size: int = 0          # sequences; 0: the configuration's
    core_blocks: int = 0         # instead of the configuration's; 0: as it is
    loops: int = 0               # r of the training step; 0: the training mean
    vs: str = ""                 # peers to time beside, nanogpt:PATH of its model.py, huginn:PATH of its raven_modeling_minimal.py
    # decode
    batch: str = "1,8,32"        # slots
    prompt_tokens: int = 32      # that stand in the cache before the clock starts
    tokens: int = 64             # to decode per slot, on average
    rule: str = "state"          # "state", "accel" or "kl", see model.Halting
    eps: float = 0.0             # its threshold; 0: the one that allocate.py found for this checkpoint
    max_loops: int = 0           # the most loops that a token may take; 0: the training mean
    uniform: int = 0             # a second uniform depth to compare with; 0: A0-min, as allocate.py found it
    wait: float = 0.75           # see sample.Decoder
    schedule: float = 0.0        # mean of random depths that replace the rule's word, not its cost; 0: off

    def __post_init__(self):
        for name, least in (("repeats", 1), ("seed", 0), ("prompt_tokens", 1), ("tokens", 1), ("eps", 0), ("max_loops", 0), ("uniform", 0),
                            ("schedule", 0), ("wait", 0), ("batch_size", 0), ("core_blocks", 0), ("loops", 0)):
            if not least <= getattr(self, name) < 2**63:
                raise ValueError(f"{name} must be at least {least} and below 2**63, not {getattr(self, name)}")
        if self.wait > 1:
            raise ValueError(f"wait must be a share between 0 and 1, not {self.wait}")
        if self.rule not in ("kl", "state", "accel"):
            raise ValueError(f"rule must be 'state', 'accel' or 'kl', not {self.rule!r}")
        if not all(size.strip().isdecimal() and 0 < int(size) <= 4096 for size in self.batch.split(",")):
            raise ValueError(f"batch must be numbers of slots up to 4096, such as 1,8,32, not {self.batch!r}")


def clock_of(device):
    """A clock that waits for the device, if that works apart from the host."""
    if not device.startswith("cuda"):
        return time.perf_counter
    return lambda: (torch.cuda.synchronize(), time.perf_counter())[1]


def random_shape(s, device):
    """A model with random weights and the training settings of its configuration; config/tiny.py is meant for bytes."""
    path = s.config or "config/tiny.py"
    values = {f.name: f.default for f in fields(trainer.Settings)}
    values |= config.read_file(path, values)
    changes = {"n_core": s.core_blocks} if s.core_blocks else {}
    if "stdlib" in values["data"]:
        changes["vocab_size"] = 257
    torch.manual_seed(s.seed)
    return random_model(path, changes).to(device), s.batch_size or values["batch_size"]


# ---------------------------------------------------------------------------------------------------------
# training

def nanogpt(module, c, loops):
    """nanoGPT (karpathy/nanoGPT, model.py) with as many layers of its own as ours has unrolled."""
    model = module.GPT(module.GPTConfig(block_size=c.block_size, vocab_size=c.vocab_size, n_layer=c.n_prelude + c.n_core * loops + c.n_coda,
                                        n_head=c.n_head, n_embd=c.n_embd, bias=False, dropout=0.0))
    return model, lambda model, x, y: model(x, y)[1]


def huginn(module, c, loops):
    """Huginn (seal-rg/recurrent-pretraining, recpre/raven_modeling_minimal.py) with the same blocks and loops, all with gradient."""
    blocks = dict(n_layers_in_prelude=c.n_prelude, n_layers_in_recurrent_block=c.n_core, n_layers_in_coda=c.n_coda)
    model = module.RavenForCausalLM(module.RavenConfig(
        n_embd=c.n_embd, n_heads=c.n_head, n_layers=sum(blocks.values()), intermediate_size=c.n_hidden, block_size=c.block_size,
        vocab_size=c.vocab_size, mean_recurrence=loops, mean_backprop_depth=loops, **blocks))
    return model, lambda model, x, y: model(x, labels=y, num_steps=(0, loops)).loss


PEERS = {"nanogpt": nanogpt, "huginn": huginn}


def load_peer(text, c, loops):
    """name:PATH -> (name, model, loss function), or one line and exit code 2."""
    name, _, path = text.partition(":")
    if name not in PEERS or not Path(path).is_file():
        config.fail(f"--vs={text} must be name:PATH of a file, with one of the names {', '.join(PEERS)}")
    folder = Path(path).resolve().parent
    sys.path[:0] = [str(folder), str(folder.parent)]       # a peer's files import each other, by name or as one package
    try:
        module = importlib.import_module(f"{folder.name}.{Path(path).stem}")
        return name, *PEERS[name](module, c, loops)
    except Exception as error:                             # a stranger's code may fail in any way
        config.fail(f"{path} cannot be timed ({type(error).__name__}: {config.reason(error)[:150]})")
    finally:
        del sys.path[:2]


def peak_flops(shapes, dtype, device):
    """The largest FLOP/s of matrix products (m, k) x (k, n) of these shapes, now, on this machine."""
    clock, runs = clock_of(device), {}
    for m, k, n in shapes:
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
        runs[m, k, n] = partial(torch.mm, a, b)
    seconds = config.interleaved(runs, 9, clock)
    return max(2 * m * k * n / statistics.median(seconds[m, k, n]) for m, k, n in runs)


def train(s):
    """Tokens per second of whole training steps: forward, backward, clipping, AdamW (and once Muon, as train.py has it)."""
    device = config.pick_device(s.device)
    dtype = config.pick_dtype(s.dtype, device)
    context = torch.autocast(device.split(":")[0], dtype) if dtype == torch.bfloat16 else nullcontext()
    model, batch = random_shape(s, device)
    c, loops, clock = model.config, s.loops or model.config.mean_loops, clock_of(device)
    x = torch.randint(c.vocab_size, (batch, c.block_size), device=device, generator=torch.Generator(device).manual_seed(s.seed))
    y, tokens = x.roll(-1, 1), x.numel()
    prelude, loop, readout = model.flops_per_token(c.block_size)
    work = tokens * (3 * (prelude + readout) + loop * (3 * min(loops, c.backprop_loops) + max(0, loops - c.backprop_loops)))
    print(f"training steps of {s.config or 'config/tiny.py'}: blocks {c.n_prelude}/{c.n_core}/{c.n_coda}, r = {loops}, {batch} x {c.block_size} tokens, "
          f"{work / tokens / 1e6:.0f} MFLOP a token; {str(dtype)[6:]}; medians of {s.repeats}\n"
          + " ".join(f"{k}={v}" for k, v in config.provenance(device).items()), flush=True)

    runs, memory = {}, {}

    def add(name, model, loss_of, optimizer="adamw"):
        """One more way to make a step; its first comes now, since it compiles."""
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        others = torch.cuda.memory_allocated() - weights if device.startswith("cuda") else 0   # what the ways before this one keep
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.startswith(("cuda", "cpu")))]
        if optimizer == "muon":
            optimizers = trainer.make_optimizers(model, trainer.Settings(optimizer="muon"), device, dtype)
            for group in optimizers[0].param_groups + optimizers[1].param_groups:
                group["lr"] = 1e-5

        def step():
            with context:
                loss = loss_of(model, x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        step()
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
            step()
            memory[name] = (torch.cuda.max_memory_allocated() - others) / 2**30
        runs[name] = step

    peers = [load_peer(text.strip(), c, loops) for text in s.vs.split(",") if text]
    model.train()
    loss_of = lambda model, x, y: model(x, y, loops)[1]                        # noqa: E731
    compiled, started = copy.copy(model), time.time()      # the same weights
    failure = trainer.compile_parts(compiled, x, context)
    print(f"compile: not possible here ({failure[:100]})" if failure else f"compiled in {time.time() - started:.0f} s", flush=True)
    if not failure:
        add("compiled", compiled, loss_of)
        add("compiled, Muon", compiled, loss_of, "muon")
    add("eager", model, loss_of)
    ours = set(runs)
    for name, peer, peer_loss in peers:
        peer.to(device).train()
        add(f"{name} eager", peer, peer_loss)
        add(f"{name} compiled", torch.compile(peer, dynamic=False), peer_loss)
    wide = 8192 if device.startswith("cuda") else 2048
    shapes = (wide, wide, wide), (tokens, c.n_embd, 2 * c.n_hidden)
    peak = peak_flops(shapes, dtype, device)
    seconds = config.interleaved(runs, s.repeats, clock)
    peak = max(peak, peak_flops(shapes, dtype, device))    # before and after: a shared machine drifts
    first = next(iter(runs))
    print(f"matrix products reach {peak / 1e12:.2f} TFLOP/s here, {peak / work * tokens:,.0f} tokens/s if there were nothing else")
    print(f"{'':>18}{'ms':>10}{'tokens/s':>12}{'MFU':>8}{f'{first} is faster by':>28}" + f"{'GiB':>8}" * bool(memory))
    lines = []
    for name in runs:
        t, ratio = statistics.median(seconds[name]), config.speedup(seconds[name], seconds[first])
        mfu = f"{work / t / peak:.0%}" if name in ours else ""
        print(f"{name:>18}{1e3 * t:>10.0f}{tokens / t:>12,.0f}{mfu:>8}{ratio:>27.2f}x" + (f"{memory[name]:>8.1f}" if memory else ""))
        lines.append(f"train_{name.replace(', ', '_').replace(' ', '_')}: tokens_per_second {tokens / t:.1f} {first}_over_it {ratio:.3f}"
                     + (f" mfu {work / t / peak:.4f}" if mfu else "") + (f" peak_memory_gib {memory[name]:.3f}" if memory else ""))
    print("\n" + "\n".join(lines))


# ---------------------------------------------------------------------------------------------------------
# scoring

@torch.inference_mode()
def skip(s):
    """Uniform depth, eager, compiled and captured, against `skip` with drawn depths: exact sizes, and the captured steps (on CUDA as graphs)."""
    device = config.pick_device(s.device)
    dtype = config.pick_dtype(s.dtype or "float32", device)
    torch.set_float32_matmul_precision("highest")                              # no TF32
    model, batch = random_shape(s, device)
    c, model, max_loops = model.config, model.to(dtype).eval(), s.max_loops or model.config.mean_loops
    if not 1 <= s.schedule <= max_loops:
        config.fail(f"--schedule={s.schedule:g} must lie between 1 and {max_loops}, the most loops that a token may take")
    x = torch.randint(c.vocab_size, (batch, c.block_size), device=device, generator=torch.Generator(device).manual_seed(s.seed))
    drawn = torch.as_tensor(scheduled_depths(s.schedule, max_loops, tuple(x.shape), s.seed)).to(device)
    print(f"scoring {batch} x {c.block_size} tokens by random weights of {s.config or 'config/tiny.py'}; drawn depths of mean {drawn.float().mean():.2f}, "
          f"at the cost of {s.rule}; {device}, {str(dtype)[6:]}; medians of {s.repeats}\n"
          + " ".join(f"{k}={v}" for k, v in config.provenance(device).items()), flush=True)
    compiled = copy.copy(model)
    compiled.loop_step = torch.compile(compiled.loop_step, dynamic=False)
    try:
        compiled(x, n_loops=1)
    except Exception as error:                             # no compiler, no headers, unsupported GPU
        print(f"compile: not possible here ({config.reason(error)[:100]})")
        compiled = None

    def halting(how, rule=s.rule, schedule=drawn, **kwargs):
        out = how(x, Halting(rule, 0.0, schedule), max_loops, **kwargs)[0]
        return out if rule == "kl" else model.readout(out)

    depth = np.full(1, max_loops), drawn.cpu().numpy()
    runs = {"uniform": (0, lambda: model(x, n_loops=max_loops)), "uniform compiled": (0, lambda: compiled(x, n_loops=max_loops)),
            "uniform captured": (0, lambda: halting(model._skip_captured, "state", torch.full_like(drawn, max_loops))),
            "skip": (1, lambda: halting(model._skip)), "skip captured": (1, lambda: halting(model._skip_captured)),
            "skip captured, late": (1, lambda: halting(model._skip_captured, late=1))}
    if compiled is None:
        del runs["uniform compiled"]
    seconds = config.interleaved({name: run for name, (_, run) in runs.items()}, s.repeats, clock_of(device))
    parts, lines = model.flops_per_token(c.block_size), []
    bound = flops("A0", depth[0], c, parts) / flops(f"A1_{s.rule}", depth[1], c, parts)
    print(f"{'':>22}{'ms':>10}{'tokens/s':>12}{'over uniform':>16}{'bound':>10}{'share':>10}")
    for name, (halts, _) in runs.items():
        t, ratio, most = statistics.median(seconds[name]), config.speedup(seconds["uniform"], seconds[name]), bound if halts else 1.0
        print(f"{name:>22}{1e3 * t:>10.1f}{x.numel() / t:>12,.0f}{ratio:>15.2f}x{most:>9.2f}x{ratio / most:>10.2f}", flush=True)
        lines.append(f"skip_{name.replace(', ', '_').replace(' ', '_')}: tokens_per_second {x.numel() / t:.1f} speedup {ratio:.3f} bound {most:.3f}")
    print("\n" + "\n".join(lines))


# ---------------------------------------------------------------------------------------------------------
# generation

def a0_min(path, ckpt):
    """The cheapest uniform depth that matches, from the checkpoint's allocate.json; 0 where it is not known."""
    try:
        found = json.loads(Path(path).with_name("allocate.json").read_text())
        same = all(found["meta"][key] == ckpt[of] for key, of in (("step", "step"), ("config", "config"), ("trained_on", "data")))
        depth = int(found["policies"]["A0"]["match"]["threshold"]) if same else 0
        return depth if 0 <= depth <= 10_000 else 0
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return 0


def decode_run(decoder, text, prompt_tokens, tokens):
    """
    Decode text (slots, T), a slot's next token whenever it is its turn, until `tokens` are done in all -> their depths.
    The prompts' keys and values are in the cache already; a slot that reaches the end of its text starts again behind its prompt.
    """
    slots, depths = list(range(len(text))), []
    decoder.running, decoder.halted = [], []
    decoder.feed(slots, [row[prompt_tokens] for row in text], [prompt_tokens] * len(text))
    while len(depths) < tokens:
        decoder.loop()
        if decoder.ready():
            slots, logits = decoder.readout()
            logits.argmax(-1).tolist()                     # what greedy decoding would go on with, and what it costs
            depths += [decoder.loops[slot] for slot in slots]
            positions = [decoder.position[slot] + 1 for slot in slots]
            positions = [position if position < len(text[0]) else prompt_tokens for position in positions]
            decoder.feed(slots, [text[slot][position] for slot, position in zip(slots, positions)], positions)
    return depths


@torch.inference_mode()
def decode(s):
    device = config.pick_device(s.device)
    dtype = config.pick_dtype(s.dtype or "float32", device)
    torch.set_float32_matmul_precision("highest")                              # no TF32
    sizes, rng = [int(size) for size in s.batch.split(",")], np.random.default_rng(s.seed)
    if s.config:
        if not s.schedule:
            config.fail("--config goes with --schedule: random weights have no signals worth measuring, only a speed")
        torch.manual_seed(s.seed)
        model, eps, about = random_model(s.config).to(device), 0.0, f"random weights of {s.config}"
        text = rng.integers(model.config.vocab_size, size=(max(sizes), model.config.block_size))
    else:
        model, ckpt, corpus = load(s.ckpt, s.data, device)
        eps = threshold(s, ckpt, s.max_loops or model.config.mean_loops)[0]
        config.check_floor(s.rule, eps, dtype)
        about = f"{s.ckpt}, step {ckpt['step']}, text of {corpus.name}"
        try:
            text, _ = corpus.windows("val", max(sizes) * model.config.block_size, model.config.block_size)
        except (ValueError, OSError) as error:
            config.fail(str(error))
        text = text[np.arange(max(sizes)) % len(text)]
    c = model.config
    model, max_loops = model.to(dtype), s.max_loops or c.mean_loops
    if s.prompt_tokens + s.tokens > c.block_size:
        config.fail(f"--prompt_tokens={s.prompt_tokens} and --tokens={s.tokens} exceed the context of {c.block_size}")
    if s.schedule and not 1 <= s.schedule <= max_loops:
        config.fail(f"--schedule={s.schedule:g} must lie between 1 and {max_loops}, the most loops that a token may take")
    rule_text = f"drawn depths of mean {s.schedule:g}, at the cost of" if s.schedule else f"below {eps:.3g}:"
    print(f"{about}; {s.prompt_tokens} tokens in the cache, {s.tokens} decoded per slot; {rule_text} {s.rule}; "
          f"{device}, {str(dtype)[6:]}; medians of {s.repeats}\n" + " ".join(f"{k}={v}" for k, v in config.provenance(device).items()), flush=True)

    if not model(torch.as_tensor(text[:1], device=device))[0].isfinite().all():
        config.fail("the logits are not finite: there is nothing worth timing")
    depth_of = None
    if s.schedule:
        found = scheduled_depths(s.schedule, max_loops, text.shape, s.seed)    # (slots, T)
        drawn = found.tolist()
        depth_of = lambda slot, position: drawn[slot][position]                # noqa: E731
    elif max(sizes) > 1:
        found = score(model, *2 * [text[:, :s.prompt_tokens + s.tokens]], s.rule, eps, max_loops)[1]
    parts, uniforms = model.flops_per_token(s.prompt_tokens + s.tokens // 2), [c.mean_loops]
    if other := s.uniform or not s.config and a0_min(s.ckpt, ckpt):
        uniforms.append(other)
    print(f"\n{'slots':>6}{'':>30}{'mean depth':>12}{'tokens/s':>12}{'speed-up':>12}{'bound':>12}{'share':>12}")
    lines = []
    for size in sizes:
        ways = {f"uniform {depth}": (None, eps, depth, 1.0, 1, None) for depth in uniforms}
        if size > 1:                                       # as with a mask: all slots loop until the slowest has halted
            slowest = found[:size].max(0).tolist()
            ways[f"{s.rule} lockstep, masked"] = s.rule, eps, max_loops, 1.0, 1, lambda slot, position, slowest=slowest: slowest[position % len(slowest)]
        for name, wait in (("lockstep", 1.0), ("continuous, wait 0", 0.0), (f"continuous, wait {s.wait:g}", s.wait)):
            ways[f"{s.rule} {name}" if size > 1 else s.rule] = s.rule, eps, max_loops, wait, 1, depth_of
        rows, runs, depths = text[:size].tolist(), {}, {}
        for name, way in ways.items():
            decoder = Decoder(model, size, *way)
            for slot, row in enumerate(rows):
                decoder.prefill(slot, row[:s.prompt_tokens])

            def run(name, decoder):
                depths[name] = decode_run(decoder, rows, s.prompt_tokens, size * s.tokens)

            runs[name] = partial(run, name, decoder)
        seconds = config.interleaved(runs, s.repeats)
        cost = {name: flops(f"A1_{ways[name][0]}" if ways[name][0] else "A0", depths[name], c, parts) for name in runs}
        first = next(iter(runs))
        per_token = {name: [t / len(depths[name]) for t in seconds[name]] for name in runs}
        for name in runs:
            speedup, bound = config.speedup(per_token[first], per_token[name]), cost[first] / cost[name]
            rate, mean = 1 / statistics.median(per_token[name]), np.mean(depths[name])
            print(f"{size:>6}{name:>30}{mean:>12.2f}{rate:>12.1f}{speedup:>11.2f}x{bound:>11.2f}x{speedup / bound:>12.2f}", flush=True)
            lines.append(f"decode_{size}_{name.replace(', ', '_').replace(' ', '_')}: mean_depth {mean:.3f} tokens_per_second {rate:.2f} "
                         f"speedup {speedup:.3f} bound {bound:.3f}")
    print("\n" + "\n".join(lines))


# ---------------------------------------------------------------------------------------------------------
# a GPU that nobody has asked yet

def gpu(s):
    """The tests that need one, then throughput, memory, graphs and skip at both sizes; each part may fail without the others."""
    if not config.pick_device(s.device).startswith("cuda"):
        config.fail("there is no CUDA device here; the other tables run on any")
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "tests"]
    parts = {"the tests marked cuda": lambda: subprocess.run(tests, cwd=Path(__file__).parent, check=True)}
    for path in ("config/tiny.py", "config/loop135m.py"):
        for dtype in ("bfloat16", "float32"):
            parts[f"skip, {path}, {dtype}"] = partial(skip, replace(s, config=path, schedule=4.94, dtype=dtype))
        parts[f"train, {path}"] = partial(train, replace(s, config=path))
        parts[f"decode, {path}"] = partial(decode, replace(s, config=path, schedule=4.94, dtype="bfloat16", repeats=3))
    ends = {}
    for name, part in parts.items():
        print(f"\n=== {name} ===", flush=True)
        started = time.time()
        try:
            part()
            ends[name] = f"{time.time() - started:.0f} s"
        except (Exception, SystemExit) as error:
            ends[name] = f"FAILED after {time.time() - started:.0f} s: {type(error).__name__}: {config.reason(error)[:300]}"
        gc.collect()
        torch.cuda.empty_cache()
    print("\n=== summary ===\n" + "\n".join(f"{name}: {end}" for name, end in ends.items()))
    if any(end.startswith("FAILED") for end in ends.values()):
        sys.exit(1)


WHAT = {"train": train, "skip": skip, "decode": decode, "gpu": gpu}


def main():
    argv = config.join_values(Settings, sys.argv[1:])
    what = [arg for arg in argv if not arg.startswith("-") and not arg.endswith(".py")]
    settings = config.parse(Settings, __doc__, [arg for arg in argv if arg not in what])
    if what not in [[name] for name in WHAT]:
        config.fail(f"say what to time, one of: {', '.join(WHAT)} (--help shows how)")
    WHAT[what[0]](settings)


if __name__ == "__main__":
    config.run(main)
