"""
Write text, each token with as many loops as it needs.

    python sample.py --ckpt=out/ckpt.pt --prompt="import os"
    python sample.py --ckpt=out/ckpt.pt --prompt=FILE:prompt.txt --show_depth        # each token in the colour of its depth
    python sample.py --ckpt=out/ckpt.pt --prompt=LINES:many.txt --slots=8 --html=depth.html      # a prompt in each line
    python sample.py --ckpt=out/ckpt.pt --prompt="import os" --uniform=8             # the same depth for every token
    python sample.py --ckpt=out/ckpt.pt --prompt="import os" --compare               # is it faster than the training mean?

Several tokens are at work at once, each of its own text, at its own position, in its own loop: continuous depth batching,
see `Decoder`. Every text starts from the end-of-text token, as every training document does. Neither the other prompts nor
the number of slots change what comes out for a prompt, but for rounding: in float32 that takes two ids, or a signal and
its threshold, which agree to the last bits.
"""

import codecs
import html
import json
import random
import re
import statistics
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

import config
from model import Halting, LoopStep
from prepare_data import TOKENIZERS, encode, token_bytes


@dataclass
class Settings:
    ckpt: str = "out/ckpt.pt"    # a checkpoint of train.py
    prompt: str = ""             # text; FILE:path, all of a file; LINES:path, a prompt in each line. May be given several times
    num_samples: int = 1         # texts per prompt
    max_new_tokens: int = 256    # tokens per text, fewer where the end of text is drawn
    temperature: float = 0.8     # 0: always the likeliest token
    top_k: int = 200             # draw among so many; 0: among all
    seed: int = 1337             # of the draws; the texts are a function of it and of their prompts
    # depth
    rule: str = "state"          # signal that stops a token: "state", "accel" or "kl", see model.Halting
    eps: float = 0.0             # its threshold; 0: the one that allocate.py found for this checkpoint
    max_loops: int = 0           # the most loops that a token may take; 0: the training mean
    uniform: int = 0             # this depth for every token instead; 0: off
    # speed
    slots: int = 8               # texts at work at the same time
    wait: float = 0.75           # halted tokens wait for one readout until they are this share of all; 0: never, 1: lockstep
    compare: bool = False        # then time it against uniform depth at the training mean
    device: str = ""             # "cuda", "cuda:1", "mps" or "cpu"; empty: the best that is there
    dtype: str = "float32"       # or "bfloat16"
    # showing
    show_depth: bool = False     # colour each token by the loops that predicted it
    html: str = ""               # write the coloured texts to this file

    def __post_init__(self):
        for name, least, most in (("num_samples", 1, 1e6), ("max_new_tokens", 0, 1e9), ("temperature", 0, 1e6), ("top_k", 0, 1e9),
                                  ("seed", 0, 2**63), ("eps", 0, 1e9), ("max_loops", 0, 1e6), ("uniform", 0, 1e6), ("slots", 1, 4096), ("wait", 0, 1)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} must lie between {least} and {most:g}, not {getattr(self, name)}")
        if self.rule not in ("kl", "state", "accel"):
            raise ValueError(f"rule must be 'state', 'accel' or 'kl', not {self.rule!r}")


DEFAULT_EPS = {"state": 0.1, "accel": 0.1, "kl": 0.01}      # where allocate.py has found none


# ---------------------------------------------------------------------------------------------------------
# the cache

class Places:
    """Where the tokens of a call stand: token j in slot slots[j], at position positions[j], with loops[j] loops behind it."""

    def place(self, slots, positions, loops, device):
        """Three lists of n ints."""
        self.list = list(zip(slots, positions, loops))     # for Python, so that it need not ask the device
        self.slots, self.positions = torch.tensor((slots, positions), device=device).unbind()    # (n,)


class Cached:
    """
    Attention of one block in decoding: a token sees what its text has left at earlier positions, and itself. Each of its
    loops overwrites the keys and values of the one before, so the cache does not grow with depth. With copies > 1 the first
    so many loops keep theirs apart, as in `LoopLM.forward`: to measure what the small cache loses, see `score`.
    """

    def __init__(self, places, slots, config, like, copies=1, together=False):
        c, self.places, self.copies, self.together = config, places, copies, together
        self.k, self.v = like.new_zeros(2, slots * copies, c.n_kv_head, c.block_size, c.n_embd // c.n_head)
        self.rows = list(zip(self.k.split(1), self.v.split(1)))

    def fill(self, slot, k, v):
        """k and v (1, n, H_kv, h), of positions 0 .. n - 1; for one copy."""
        assert self.copies == 1
        self.k[slot, :, :k.shape[1]], self.v[slot, :, :v.shape[1]] = k[0].transpose(0, 1), v[0].transpose(0, 1)

    def __call__(self, q, k, v):                                               # (n, H, h), (n, H_kv, h) twice
        at, copies = self.places, self.copies
        rows = at.slots
        if copies > 1:
            rows = torch.tensor([slot * copies + min(loop, copies - 1) for slot, _, loop in at.list], device=q.device)
        self.k[rows, :, at.positions], self.v[rows, :, at.positions] = k, v
        if self.together:                                  # on a GPU: a few large kernels, with what they hide masked
            seen = torch.arange(self.k.shape[2], device=q.device) <= at.positions[:, None]       # (n, block_size)
            return F.scaled_dot_product_attention(q[:, :, None], self.k[rows], self.v[rows], seen[:, None, None], enable_gqa=True)[:, :, 0]
        # Token by token, each over its own past: nothing is copied or padded for the sake of the company.
        y, grouped = [], q.shape[1] > k.shape[1]
        for one, (slot, position, loop) in zip(q[:, None, :, None].unbind(), at.list):           # (1, H, 1, h) each
            k, v = self.rows[slot * copies + min(loop, copies - 1)]
            k, v = k.narrow(2, 0, position + 1), v.narrow(2, 0, position + 1)                     # (1, H_kv, position + 1, h)
            y.append(F.scaled_dot_product_attention(one, k, v, enable_gqa=grouped))
        return torch.cat(y)[:, :, 0] if len(y) > 1 else y[0][:, :, 0]


# ---------------------------------------------------------------------------------------------------------
# continuous depth batching

class Decoder:
    """
    Tokens of different texts, positions and loops advance together. Each slot has one token at work:

        feed      embedding, prelude, s_0                          the token stands before its first loop
        loop      one core step for all running tokens             those whose signal falls below eps have halted
        readout   coda, norm, head, for all halted tokens          its logits choose the token that is fed next

    A token that halts leaves its slot to its successor while others go on looping: nobody waits for the slowest. Only that
    a readout and the feed after it cost much whoever is in them (all weights of coda, head and prelude are read), so that with
    wait > 0 halted tokens rest until they are that share of the tokens at work. wait = 1 is lockstep.

    rule None loops everybody max_loops times. depth_of (slot, position) -> depth replaces the rule's word, not its cost.
    On CUDA, or with captured=True, `loop` replays a model.LoopStep over all slots, and hears of a halt one loop late.
    """

    def __init__(self, model, slots, rule, eps, max_loops, wait=0.0, copies=1, depth_of=None, captured=None):
        c, like = model.config, model.wte.weight
        self.model, self.rule, self.eps, self.max_loops, self.wait, self.depth_of = model, rule, eps, max_loops, wait, depth_of
        self.halting, self.memory, self.places = rule and Halting(rule, eps), None, Places()
        captured = (like.is_cuda if captured is None else captured) and copies == 1
        self.prelude, self.core, self.coda = ([Cached(self.places, slots, c, like, n, captured) for _ in blocks] for blocks, n in (
            (model.prelude_blocks, 1), (model.core_blocks, copies), (model.coda_blocks, 1)))
        self.e, self.s = like.new_zeros(2, slots, c.n_embd)
        self.step = None
        if captured:
            keys = [(cached.k, cached.v) for cached in self.core + (self.coda if rule == "kl" else [])]
            self.step = LoopStep(model, rule or "state", slots, 1, keys)
            self.step.limit(eps if rule else 0.0, max_loops)                   # nothing lies below 0
            self.e, self.s = self.step.e, self.step.s
            self.memory = self.step.memory
        self.rope = torch.stack((model.cos, model.sin))    # (2, block_size, 1, h)
        self.position, self.loops = [0] * slots, [0] * slots
        self.running, self.halted = [], []                 # slots

    def place(self, slots):
        """-> the slots as a tensor, and the tokens' rows of the rope table."""
        self.places.place(slots, [self.position[slot] for slot in slots], [self.loops[slot] for slot in slots], self.s.device)
        return self.places.slots, self.rope[:, self.places.positions].unbind()

    def prefill(self, slot, ids):
        """Bring a prompt's keys and values to positions 0, 1, ... of a slot -> the tokens' depths."""
        idx = torch.tensor(ids, device=self.s.device)
        rule = (self.rule, self.eps) if self.rule else ("state", 0.0)          # nothing lies below 0
        return self.model.prefill(idx, self.prelude + self.core + self.coda, slot, *rule, self.max_loops).tolist()

    def feed(self, slots, ids, positions):
        """The next token of each of these slots."""
        for slot, position in zip(slots, positions):
            self.position[slot], self.loops[slot] = position, 0
        rows, rope = self.place(slots)
        e = self.model.prelude(torch.tensor(ids, device=rows.device), self.prelude, rope)
        self.e[rows], self.s[rows] = e, self.model.initial_state(e, self.places.positions)
        for bank in self.memory or ():                     # a signal that compares with nothing is not below eps
            bank[rows] = False if bank.dtype == torch.bool else float("nan")
        if self.step:
            depths = self.depth_of and [self.depth_of(*at) for at in zip(slots, positions)]
            self.step.put(slots, rows, self.places.positions, torch.stack(rope), depths)
        self.running += slots

    def loop(self):
        """One loop of all running tokens."""
        slots = self.running
        if self.step:
            self.step.replay()
            left = self.step.counts()
            self.running = [slot for slot in slots if left[slot]]
            self.halted += [slot for slot in slots if not left[slot]]
            return
        rows, rope = self.place(slots)
        previous = self.s[rows]
        s = self.model.loop_step(previous, self.e[rows], self.core, rope)      # (n, d)
        self.s[rows] = s
        for slot in slots:
            self.loops[slot] += 1
        halts = [False] * len(slots)
        if self.rule:
            logits = self.model.readout(s, self.coda, rope) if self.halting.reads else None
            halts = self.ask(rows, s, previous, logits)
        if self.depth_of:
            halts = [self.loops[slot] >= self.depth_of(slot, self.position[slot]) for slot in slots]
        halts = [halt or self.loops[slot] == self.max_loops for halt, slot in zip(halts, slots)]
        self.running = [slot for slot, halt in zip(slots, halts) if not halt]
        self.halted += [slot for slot, halt in zip(slots, halts) if halt]

    def ask(self, rows, s, previous, logits):
        """The rule's word on the tokens in these slots; its memory has a row for each slot."""
        self.halting.memory = self.memory and tuple(bank[rows] for bank in self.memory)
        halts = self.halting(s, previous, logits).tolist()
        if self.memory is None and self.halting.memory:
            self.memory = tuple(x.new_zeros(len(self.s), *x.shape[1:]) for x in self.halting.memory)
        for bank, new in zip(self.memory or (), self.halting.memory or ()):
            bank[rows] = new
        return halts

    def ready(self):
        """Is it time for a readout?"""
        waiting = len(self.halted)
        return waiting > 0 and waiting >= self.wait * (waiting + len(self.running))

    def readout(self):
        """-> the halted tokens' slots, and their logits (n, V). Their slots are free for `feed`."""
        slots, self.halted = self.halted, []
        rows, rope = self.place(slots)
        if self.step:
            for slot, depth in zip(slots, self.step.loops[rows].tolist()):
                self.loops[slot] = depth
        if self.rule and self.halting.reads:               # the readout that passed the check
            return slots, (self.step.result if self.step else self.memory[0])[rows]
        return slots, self.model.readout(self.s[rows], self.coda, rope)


@dataclass
class Text:
    """A prompt on its way to becoming a text."""
    ids: list                                              # end of text, prompt, and what was added
    left: int                                              # tokens that may still be added
    chance: random.Random = None                           # its own random numbers
    index: int = 0                                         # among all texts
    depths: list = field(default_factory=list)             # the loops that predicted ids[1], ids[2], ...; 0: not known
    window: int = 0                                        # which of ids stands at position 0
    added: int = 0                                         # of ids, the last so many


@torch.inference_mode()
def decode(decoder, texts, choose, stop=None):
    """
    Continue texts, as many at a time as the decoder has slots; the others queue. Yields (text, id, depth) as it goes.

    choose (logits (n, V), n texts) -> n ids. A text ends with the id `stop`, or when nothing is `left`. One that
    outgrows the context goes on from the second half of what fits, as a new prompt.
    """
    context = decoder.model.config.block_size
    queue, at, free = deque(text for text in texts if text.left > 0), {}, list(range(len(decoder.s)))[::-1]

    def begin(slot, text):
        """All but the last token of a prompt go through prefill; -> the last, which is decoded like any other."""
        if len(text.ids) - text.window > context:
            text.window = len(text.ids) - max(1, context // 2)
        ids = text.ids[text.window:]
        depths = decoder.prefill(slot, ids[:-1]) if len(ids) > 1 else []
        if len(text.depths) < len(text.ids) - 1:
            text.depths = [0] * text.window + depths
        return slot, ids[-1], len(ids) - 1

    feed = []                                              # (slot, id, position)
    while True:
        while queue and free:
            slot = free.pop()
            at[slot] = queue.popleft()
            feed.append(begin(slot, at[slot]))
        if not at:
            return
        if feed:
            decoder.feed(*map(list, zip(*feed)))
            feed = []
        if decoder.running:
            decoder.loop()
        if not decoder.ready():
            continue
        slots, logits = decoder.readout()
        for slot, id in zip(slots, choose(logits, [at[slot] for slot in slots])):
            text, depth = at[slot], decoder.loops[slot]
            text.ids.append(id)
            text.depths.append(depth)
            text.left, text.added = text.left - 1, text.added + 1
            yield text, id, depth
            if text.left == 0 or id == stop:
                free.append(slot)
                del at[slot]
            elif decoder.position[slot] + 1 < context:
                feed.append((slot, id, decoder.position[slot] + 1))
            else:
                feed.append(begin(slot, text))


def score(model, x, y, rule, eps, max_loops, slots=64, copies=1):
    """
    What `decode` would have predicted, had it written windows x (n, T) itself -> cross-entropy against y in nats and
    depth, (n, T) each, on the CPU. copies = max_loops keeps the keys and values of all loops apart, as `LoopLM.forward`.
    """
    texts = [Text([int(row[0])], len(row), index=i) for i, row in enumerate(x)]
    loss = torch.zeros(x.shape)

    def choose(logits, texts):                             # the next token of x, whatever the logits say
        at = [(text.index, len(text.ids) - 1) for text in texts]
        targets = torch.tensor([y[i, t] for i, t in at], device=logits.device)
        for (i, t), nats in zip(at, F.cross_entropy(logits.float(), targets, reduction="none").tolist()):
            loss[i, t] = nats
        return [int(x[i, min(t + 1, len(x[i]) - 1)]) for i, t in at]

    for _ in decode(Decoder(model, min(slots, len(texts)), rule, eps, max_loops, wait=0.75, copies=copies), texts, choose):
        pass
    return loss.numpy(), torch.tensor([text.depths for text in texts]).numpy()


def sampler(temperature, top_k):
    """-> choose, for `decode`: each text draws with its own random numbers, so its company does not matter."""
    def choose(logits, texts):
        if not logits.amax(-1).isfinite().all():
            raise FloatingPointError("the logits are not finite: this checkpoint cannot write text")
        if temperature == 0:
            return logits.argmax(-1).tolist()
        logits = (logits.cpu() if logits.device.type == "mps" else logits).double()                         # (n, V)
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
        if 0 < top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
        cumulative = logits.softmax(-1).cumsum(-1)
        drawn = torch.tensor([[text.chance.random()] for text in texts], dtype=torch.float64, device=logits.device)
        return torch.searchsorted(cumulative, drawn * cumulative[:, -1:], right=True)[:, 0].tolist()

    return choose


def make_texts(prompts, num_samples, max_new_tokens, seed, eot):
    """Lists of ids -> Texts. The k-th of equal prompts draws the same wherever it stands in the queue."""
    seen, texts = Counter(), []
    for ids in prompts:
        for _ in range(num_samples):
            k = seen[tuple(ids)]
            seen[tuple(ids)] += 1
            texts.append(Text([eot, *ids], max_new_tokens, random.Random(f"{seed} {k} {ids}"), len(texts)))
    return texts


# ---------------------------------------------------------------------------------------------------------
# showing

STEERING = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"        # escape sequences and changes of direction
PALETTE = ("#e8f1fa", "#cfe3f5", "#9ec5e8", "#fbe3a8", "#f9c46b", "#f29a4a", "#e0662f", "#b8321c")      # shallow to deep


def color(depth, max_loops):
    return PALETTE[min(len(PALETTE) - 1, (depth - 1) * len(PALETTE) // max_loops)]


class Pieces:
    """Ids one by one -> the text that each completes: a character of several bytes comes with the last of them."""

    def __init__(self, pieces):
        self.pieces, self.decoder = pieces, codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, id, final=False):
        text = self.decoder.decode(self.pieces[id], final)
        return re.sub(STEERING, "\ufffd", text)


def in_color(text, depth, max_loops):
    """For a terminal that knows 24-bit colours: dark on the colour of the depth."""
    if not (text and depth):
        return text
    r, g, b = (int(color(depth, max_loops)[i:i + 2], 16) for i in (1, 3, 5))
    return "\n".join(f"\033[38;2;0;0;0;48;2;{r};{g};{b}m{line}\033[0m" if line else "" for line in text.split("\n"))


def page(texts, pieces, eot, about):
    """-> one self-contained HTML page: the texts, each token on the colour of its depth; prompts are underlined."""
    blocks, deepest = [], max([1, *(depth for text in texts for depth in text.depths)])
    for text in texts:
        piece, new, spans = Pieces(pieces), len(text.ids) - text.added, []
        for i, (id, depth) in enumerate(zip(text.ids[1:], text.depths), 1):
            shown = piece(eot, final=True) + "⏹" if id == eot else html.escape(piece(id))
            style = f"background:{color(depth, deepest)}" if depth else ""
            spans.append(f'<span{"" if i >= new else " class=prompt"} style="{style}" title="{depth or "?"} loops">{shown}</span>')
        blocks.append(f"<pre>{''.join(spans)}{piece(eot, final=True)}</pre>")
    legend = " ".join(f'<span style="background:{color(d, deepest)}">&nbsp;{d}&nbsp;</span>' for d in range(1, deepest + 1))
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>nanoloop: depth per token</title>
<style>
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff }}
pre {{ font: 15px/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #ddd; padding: 1rem }}
.prompt {{ text-decoration: underline; text-decoration-color: #888; text-underline-offset: 4px }}
</style></head><body>
<p>Each token on the colour of its depth, the loops that were spent on predicting it: {legend}. Prompts are underlined.</p>
<p>{html.escape(about)}</p>
{chr(10).join(blocks)}
</body></html>
"""


def read_prompts(values, tokenizer):
    """The values of --prompt -> a list of lists of ids."""
    texts = []
    for value in values:
        kind, colon, path = value.partition(":")
        if colon and kind in ("FILE", "LINES"):
            config.check_file(path)
            try:
                content = Path(path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                config.fail(f"cannot read the prompt file {path!r}: {config.reason(error)}")
            if kind == "FILE":
                texts.append(content)
            elif content:
                texts += content.removesuffix("\n").split("\n")
        else:
            texts.append(value)
    if not texts:
        config.fail(f"{path} has no lines: there is nothing to continue")
    return [encode(tokenizer, text).tolist() for text in texts]


def threshold(s, ckpt, max_loops):
    """-> eps, and where it comes from: the command line, allocate.json if it speaks of this checkpoint, or a guess."""
    if s.eps:
        return s.eps, "given"
    path = Path(s.ckpt).with_name("allocate.json")
    try:
        found = json.loads(path.read_text())
        about = {"step": ckpt["step"], "config": ckpt["config"], "trained_on": ckpt["data"], "max_loops": max_loops}
        if all(found["meta"][key] == value for key, value in about.items()):
            eps = float(found["decode"][s.rule]["threshold"])
            if 0 <= eps <= 1e9:
                return eps, f"{path} chose it"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass                                               # then it has no word on this checkpoint
    return DEFAULT_EPS[s.rule], f"a guess: python allocate.py --ckpt={s.ckpt} would choose one"


def main():
    argv = config.join_values(Settings, sys.argv[1:])
    prompts = [arg.removeprefix("--prompt=") for arg in argv if arg.startswith("--prompt=")] 
    s = config.parse(Settings, __doc__, argv)
    device = config.pick_device(s.device)
    dtype = config.pick_dtype(s.dtype, device)
    torch.set_float32_matmul_precision("highest")                              # no TF32
    model, ckpt = config.load_model(s.ckpt, device)
    model, c, tokenizer = model.to(dtype), model.config, ckpt["data"]["tokenizer"]
    if TOKENIZERS.get(tokenizer, (0,))[0] != c.vocab_size:
        config.fail(f"{s.ckpt} has {c.vocab_size} ids of the tokenizer {tokenizer!r}: no such one is known here ({', '.join(TOKENIZERS)})")
    try:
        pieces = token_bytes(tokenizer)
        prompts = read_prompts(prompts or [s.prompt], tokenizer)
    except ValueError as error:
        config.fail(str(error))
    eot = len(pieces) - 1
    if s.html:
        config.check_writable(s.html)
        if Path(s.html).exists() and not s.html.endswith((".html", ".htm")):
            config.fail(f"{s.html} exists and is no page: choose another --html=")

    # what will run
    if s.uniform:
        rule, eps, max_loops, about = None, 0.0, s.uniform, f"{s.uniform} loops for every token"
    else:
        rule, max_loops = s.rule, s.max_loops or c.mean_loops
        eps, origin = threshold(s, ckpt, max_loops)
        config.check_floor(rule, eps, dtype)
        about = f"a token stops when its {rule} signal is below {eps:g} ({origin}), after {max_loops} loops at the latest"
    print(f"{s.ckpt}: step {ckpt['step']}; {about}; {device}, {str(dtype)[6:]}")
    longest = max(map(len, prompts)) + 1
    if longest > c.block_size:
        print(f"a prompt of {longest} tokens exceeds the context of {c.block_size}: its last {max(1, c.block_size // 2)} are read")
    print(flush=True)

    def run(rule, max_loops, texts):
        """-> an iterator over (text, id, depth)."""
        decoder = Decoder(model, min(s.slots, len(texts)), rule, eps, max_loops, s.wait)
        return decode(decoder, texts, sampler(s.temperature, s.top_k), eot)

    def texts():
        return make_texts(prompts, s.num_samples, s.max_new_tokens, s.seed, eot)

    # One text is printed as it comes; the next ones follow, as far as they are by then.
    written, depths, shown, started = texts(), [], 0, time.perf_counter()
    piece, at = Pieces(pieces), 1
    try:
        for _, _, depth in run(rule, max_loops, written):
            depths.append(depth)
            while shown < len(written) and written[shown].added:
                text = written[shown]
                for id, loops in zip(text.ids[at:], text.depths[at - 1:]):
                    sys.stdout.write(in_color(piece(id), loops, max_loops) if s.show_depth else piece(id))
                at = len(text.ids)
                sys.stdout.flush()
                if text.left and text.ids[-1] != eot:
                    break
                sys.stdout.write(piece(eot, final=True))   # a character that was not completed
                print("\n" + 40 * "-")
                piece, at, shown = Pieces(pieces), 1, shown + 1
    except torch.OutOfMemoryError:
        config.fail(f"{device} has too little memory: try fewer --slots than {s.slots}")
    except FloatingPointError as error:
        config.fail(str(error))
    except KeyboardInterrupt:
        print()
        config.fail("interrupted")
    seconds = time.perf_counter() - started

    mean = sum(depths) / max(1, len(depths))
    if s.show_depth:
        print("loops: " + " ".join(in_color(f" {d} ", d, max_loops) for d in range(1, max(depths, default=1) + 1)))
    if s.html:
        about = f"{s.ckpt}, step {ckpt['step']}: {about}. {len(depths):,} tokens were added, with {mean:.2f} loops on average."
        try:
            config.write_whole(s.html, lambda path: Path(path).write_text(page(written, pieces, eot, about), encoding="utf-8"))
        except OSError as error:
            config.fail(f"cannot write {s.html}: {error.strerror}")
        print(f"html: {s.html}")
    print(f"texts: {len(written)}\ntokens: {len(depths)}\nmean_depth: {mean:.3f}\ntokens_per_second: {len(depths) / seconds:.1f}")
    if s.compare and depths:
        tokens = {}

        def timed(name, *how):
            tokens[name] = sum(1 for _ in run(*how, texts()))

        seconds = config.interleaved({"halting": partial(timed, "halting", rule, max_loops),
                                      "uniform": partial(timed, "uniform", None, c.mean_loops)}, 3)
        per_token = {name: [t / tokens[name] for t in seconds[name]] for name in seconds}
        print(f"compared_tokens_per_second: {1 / statistics.median(per_token['halting']):.1f}\n"
              f"uniform_{c.mean_loops}_tokens_per_second: {1 / statistics.median(per_token['uniform']):.1f}\n"
              f"speedup_over_uniform_{c.mean_loops}: {config.speedup(per_token['uniform'], per_token['halting']):.3f}")


if __name__ == "__main__":
    config.run(main)
