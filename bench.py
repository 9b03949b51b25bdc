"""
How fast is it? Ratios within a round of A B A B, medians over the rounds; run nothing else meanwhile.

    python bench.py decode --ckpt=out/ckpt.pt                                      # generation, lockstep and continuous
    python bench.py decode --config=config/loop135m.py --schedule=4.94             # random weights, drawn depths of this mean
"""

import json
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

import config
from allocate import flops, random_model, scheduled_depths
from measure import load
from sample import Decoder, score, threshold


@dataclass
class Settings:
    ckpt: str = "out/ckpt.pt"    # a checkpoint of train.py
    config: str = ""             # random weights of this training configuration instead
    data: str = ""               # folder of shards; empty: the one that the checkpoint was trained on
    device: str = ""             # "cuda", "cuda:1", "mps" or "cpu"; empty: the best that is there
    dtype: str = "float32"       # or "bfloat16"
    repeats: int = 9             # rounds of A B A B ...; the median counts
    seed: int = 0                # of random weights, their text and the schedule
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
                            ("schedule", 0), ("wait", 0)):
            if not least <= getattr(self, name) < 2**63:
                raise ValueError(f"{name} must be at least {least} and below 2**63, not {getattr(self, name)}")
        if self.wait > 1:
            raise ValueError(f"wait must be a share between 0 and 1, not {self.wait}")
        if self.rule not in ("kl", "state", "accel"):
            raise ValueError(f"rule must be 'state', 'accel' or 'kl', not {self.rule!r}")
        if not all(size.strip().isdigit() and int(size) for size in self.batch.split(",")):
            raise ValueError(f"batch must be slots, such as 1,8,32, not {self.batch!r}")


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
    dtype = config.pick_dtype(s.dtype, device)
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


WHAT = {"decode": decode}


def main():
    argv = config.join_values(Settings, sys.argv[1:])
    what = [arg for arg in argv if not arg.startswith("-") and not arg.endswith(".py")]
    settings = config.parse(Settings, __doc__, [arg for arg in argv if arg not in what])
    if what not in [[name] for name in WHAT]:
        config.fail(f"say what to time, one of: {', '.join(WHAT)} (--help shows how)")
    WHAT[what[0]](settings)


if __name__ == "__main__":
    config.run(main)
