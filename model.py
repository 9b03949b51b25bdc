"""
A depth-recurrent ("looped") transformer: one weight-shared core, applied as often as a token needs.

    tokens -> embedding -> prelude blocks -> e                      once per token
    s_0 ~ initial state;  s_i = core(inject(s_{i-1}, e))            loop i = 1..r, shared weights
    logits_i = head(norm(coda(s_i)))                                "readout" of s_i

Read it top to bottom: configuration, attention, block, the model with its four methods
(`prelude`, `initial_state`, `loop_step`, `readout`) and `forward` on top of them, then halting:
the signals that tell whether a token has reached its fixed point, and what happens once it has.

The architecture follows Huginn (arXiv 2502.05171), the halting rule `kl` and the sizes of
`config/loop135m.py` "Per-Token Fixed-Point Convergence in Depth-Recurrent Transformers"
(arXiv 2607.14427), the rule `accel` Two-Scale Latent Dynamics (arXiv 2509.23314).
"""

import gc
import math
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


@dataclass
class LoopConfig:
    # model
    block_size: int = 1024       # context: the most tokens in one sequence
    vocab_size: int = 50257      # real ids; train.py takes it from the data's tokenizer
    n_embd: int = 576            # width d
    n_head: int = 9              # query heads, each n_embd / n_head wide
    n_kv_head: int = 3           # key/value heads, each shared by n_head / n_kv_head query heads
    n_hidden: int = 1536         # inner width of SwiGLU
    n_prelude: int = 2           # blocks before the loop
    n_core: int = 4              # blocks in the loop, the same weights at every loop
    n_coda: int = 2              # blocks after the loop
    injection: str = "linear"    # how e enters each loop: "linear", an adapter on [s ; e], or "add", s + e
    state_init: str = "normal"   # s_0: "normal", truncated, std sqrt(2/5), or "zeros"
    mean_loops: int = 8          # mean of r in training, and the depth of forward() unless told
    backprop_loops: int = 8      # gradients flow through the last so many loops

    def __post_init__(self):
        """Raises ValueError with one line that names the field, what is wrong and what would do."""
        for f in fields(LoopConfig):
            value, least = getattr(self, f.name), 0 if f.name in ("n_prelude", "n_coda") else 1
            if f.type is int and (type(value) is not int or value < least):
                raise ValueError(f"{f.name} must be a whole number of at least {least}, not {value!r}")
        if self.n_embd % self.n_head or self.n_embd // self.n_head % 2:
            raise ValueError(f"n_head={self.n_head} must divide n_embd={self.n_embd} into heads of even width")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_kv_head={self.n_kv_head} must divide n_head={self.n_head}")
        if self.injection not in ("linear", "add"):
            raise ValueError(f"injection must be 'linear' or 'add', not {self.injection!r}")
        if self.state_init not in ("normal", "zeros"):
            raise ValueError(f"state_init must be 'normal' or 'zeros', not {self.state_init!r}")


# ---------------------------------------------------------------------------------------------------------
# the block

def row_blocks(n):
    """n queries in at most four parts of 32 or more: [(first, end), ...]."""
    step = max(32, -(-n // 4))
    return [(i, min(i + step, n)) for i in range(0, n, step)]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32 whatever the input; keeps the input's dtype."""

    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):                                               # (..., d)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), 1e-6).to(x.dtype)


def rope_table(positions, head_dim, base=10000.0):
    """[cos cos] and [-sin sin] of each position's angles: (n,) -> 2 x (n, 1, head_dim), float32."""
    freqs = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    angles = positions.double()[:, None, None] * freqs
    return torch.cat((angles, angles), -1).cos().float(), torch.cat((-angles, angles), -1).sin().float()


def rotate(x, rope):
    """Rotary position embedding, (..., n, heads, head_dim) -> the same: a head's halves a, b become a cos - b sin, b cos + a sin."""
    cos, sin = rope
    halves_swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (x * cos + halves_swapped * sin).to(x.dtype)


def project(x, weight, sizes):
    """x (..., d) times a matrix that holds several -> one (..., size) of each."""
    if torch.is_grad_enabled() and not x.is_cuda:          # training on a CPU: to join the parts' gradients would cost more
        return [F.linear(x, part) for part in weight.split(sizes)]
    return F.linear(x, weight).split(sizes, dim=-1)


def attention(q, k, v, at, blocks):
    """
    q (B, H, Q, h), k and v (B, H_kv, T, h) -> (B, H, Q, h): the query in row j of sequence b stands at position at[b, j]
    (at is (B, Q) or (1, Q)) and sees the keys up to there.

    Plain matrix products, one block of rows after the other, each with those keys that it can see: half of the work of
    the whole square, and scores that stay in the processor's cache. blocks: (first row, end, low, high) each, where all
    rows see the keys before `low` and none those from `high` on.
    """
    B, H, Q, h = q.shape
    G, out = k.shape[1], []
    for first, end, low, high in blocks:
        rows = (q[:, :, first:end] * h ** -0.5).reshape(B, G, -1, h)           # query heads that share a key head, stacked
        att = (rows @ k[:, :, :high].mT).float().view(B, H, end - first, high)
        hidden = torch.arange(low, high, device=q.device) > at[:, None, first:end, None]         # (B, 1, rows, high - low)
        att[..., low:].masked_fill_(hidden, -math.inf)
        att = att.softmax(-1).to(v.dtype).view(B, G, -1, high)
        out.append((att @ v[:, :, :high]).view(B, H, end - first, h))
    return torch.cat(out, dim=2)


def causal_attention(q, k, v):
    """q (B, T, H, h), k and v (B, T, H_kv, h) -> (B, T, H, h): each token sees itself and the past."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))                           # (B, heads, T, h)
    T = q.shape[2]
    if q.is_cuda or q.dtype == torch.float32 and not torch.is_grad_enabled():
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:                                                  # on a CPU the fused kernel is slow backward, and in bfloat16
        blocks = [(first, end, first, end) for first, end in row_blocks(T)]
        y = attention(q, k, v, torch.arange(T, device=q.device)[None], blocks)
    return y.transpose(1, 2)


class Block(nn.Module):
    """
    Causal attention and SwiGLU in sandwich norm: x = norm2(attn(norm1(x)) + x), x = norm4(mlp(norm3(x)) + x).
    The outer norms act on the residual stream: they bound the state, and the loop can contract.
    """

    def __init__(self, c):
        super().__init__()
        self.head_dim = h = c.n_embd // c.n_head
        self.sizes = (c.n_embd, c.n_kv_head * h, c.n_kv_head * h), (c.n_hidden, c.n_hidden)
        self.norm1, self.norm2, self.norm3, self.norm4 = (RMSNorm(c.n_embd) for _ in range(4))
        self.qkv = nn.Linear(c.n_embd, sum(self.sizes[0]), bias=False)
        self.attn_out = nn.Linear(c.n_embd, c.n_embd, bias=False)
        self.gate_up = nn.Linear(c.n_embd, 2 * c.n_hidden, bias=False)
        self.mlp_out = nn.Linear(c.n_hidden, c.n_embd, bias=False)

    def forward(self, x, rope, attend=causal_attention):
        """(..., T, d) -> (..., T, d). `attend(q, k, v)` decides what each token sees; halting replaces it."""
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in project(self.norm1(x), self.qkv.weight, self.sizes[0]))
        y = attend(rotate(q, rope), rotate(k, rope), v)                        # (..., T, H, h)
        x = self.norm2(self.attn_out(y.flatten(-2)) + x)
        gate, up = project(self.norm3(x), self.gate_up.weight, self.sizes[1])
        return self.norm4(self.mlp_out(F.silu(gate) * up) + x)


class CrossEntropy(torch.autograd.Function):
    """Summed cross-entropy of h (N, d) times weight (V, d) against targets (N,), some rows at a time. The gradients are
    computed in the same pass, so that the logits are needed once and are gone: (softmax - one-hot) times weight, and times h."""
    at_once = 2**26                                        # logits: 256 MB

    @staticmethod
    def forward(ctx, h, weight, targets, learns):
        w, rows, total = weight.to(h.dtype), max(1, CrossEntropy.at_once // len(weight)), 0.0
        dh, dw = (torch.empty_like(h), torch.zeros_like(weight, dtype=torch.float32)) if learns else (None, None)
        for first in range(0, len(h), rows):
            part, target = h[first:first + rows], targets[first:first + rows, None]
            log_p = F.linear(part, w).float().log_softmax(-1)                                # (rows, V)
            counts = (target >= 0).float()
            total = total - (log_p.gather(1, target.clamp_min(0)) * counts).sum()
            if learns:
                dlogits = log_p.exp_().scatter_add_(1, target.clamp_min(0), -counts).mul_(counts).to(h.dtype)
                dh[first:first + rows] = dlogits @ w
                dw += dlogits.T @ part
        ctx.save_for_backward(dh, dw)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        dh, dw = ctx.saved_tensors
        return dh * scale, dw * scale, None, None


# ---------------------------------------------------------------------------------------------------------
# the model

class LoopLM(nn.Module):

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        padded_vocab = (c.vocab_size + 63) // 64 * 64      # matrix products like multiples of 64
        self.wte = nn.Embedding(padded_vocab, c.n_embd)    # also the head: the two are tied
        self.prelude_blocks = nn.ModuleList(Block(c) for _ in range(c.n_prelude))
        self.adapter = nn.Linear(2 * c.n_embd, c.n_embd, bias=False) if c.injection == "linear" else None
        self.core_blocks = nn.ModuleList(Block(c) for _ in range(c.n_core))
        self.coda_blocks = nn.ModuleList(Block(c) for _ in range(c.n_coda))
        self.norm = RMSNorm(c.n_embd)
        self.buckets = {}                                  # on CUDA: the captured steps of forward_halting
        cos, sin = rope_table(torch.arange(c.block_size), c.n_embd // c.n_head)
        self.register_buffer("cos", cos, persistent=False)                     # (block_size, 1, h)
        self.register_buffer("sin", sin, persistent=False)
        # The s_0 of evaluation and generation: one row per position, so that what a token becomes never
        # depends on its company. Saved with the weights, since it is part of the function they compute.
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("state_table", truncated_normal_(torch.empty(c.block_size, c.n_embd), 0.4 ** 0.5, generator))
        self._init_weights()

    def _init_weights(self):
        c = self.config
        std = (2 / (5 * c.n_embd)) ** 0.5
        unrolled = c.n_prelude + c.n_core * c.mean_loops + c.n_coda
        for name, p in self.named_parameters():
            if p.dim() == 2:
                is_output = name.endswith(("attn_out.weight", "mlp_out.weight"))
                truncated_normal_(p, std / (2 * unrolled) ** 0.5 if is_output else std)

    def rope(self, T):
        if T > self.config.block_size:
            raise ValueError(f"{T} tokens do not fit the context of {self.config.block_size}")
        return self.cos[:T], self.sin[:T]

    def run(self, blocks, x, attend=None, rope=None):
        """
        x (B, T, d) through some blocks. Halting and decoding bring their own attention, one for each of the blocks (see
        Block), and the tokens' positions as rows of the rope table; then x may have any shape (..., d).
        """
        rope = rope or self.rope(x.shape[1])
        for block, attention in zip(blocks, attend or [causal_attention] * len(blocks)):
            x = block(x, rope, attention)
        return x

    def prelude(self, idx, attend=None, rope=None):
        """Token ids (B, T) -> e (B, T, d): what every loop is reminded of."""
        return self.run(self.prelude_blocks, self.wte(idx) * self.config.n_embd ** 0.5, attend, rope)

    def initial_state(self, e, at=None):
        """
        s_0 (B, T, d) for e (B, T, d): in training fresh noise from torch's global generator, else the fixed table.
        With positions at (n,) for e (n, d).
        """
        if self.config.state_init == "zeros":
            return torch.zeros_like(e)
        if self.training:
            return truncated_normal_(torch.empty_like(e), 0.4 ** 0.5)
        if at is not None:
            return self.state_table[at].to(e.dtype)
        return self.state_table[:e.shape[1]].to(e.dtype).repeat(len(e), 1, 1)

    def loop_step(self, s, e, attend=None, rope=None):
        """One loop: s_{i-1} and e, (B, T, d) each -> s_i (B, T, d)."""
        x = s + e if self.adapter is None else self.adapter(torch.cat((s, e), dim=-1)).to(s.dtype)
        return self.run(self.core_blocks, x, attend, rope)

    def finish(self, s, attend=None, rope=None):
        """What the head reads: s (B, T, d) -> (B, T, d)."""
        return self.norm(self.run(self.coda_blocks, s, attend, rope))

    def readout(self, s, attend=None, rope=None):
        """The next-token logits that a state stands for: s (B, T, d) -> (B, T, vocab_size)."""
        logits = F.linear(self.finish(s, attend, rope), self.wte.weight)
        return logits[..., :self.config.vocab_size]        # the padded rows can never be predicted

    def loss(self, s, targets, reduction="mean"):
        """
        Cross-entropy in nats, float32, of the readout of s (B, T, d) against targets (B, T), where -1 is not counted; "mean" or
        "sum". The logits never stand whole in memory: with 50,257 ids and 16 * 1,024 tokens they would be 3.3 GB, thrice.
        """
        h, weight = self.finish(s).flatten(0, 1), self.wte.weight[:self.config.vocab_size]
        if torch.is_autocast_enabled(h.device.type):
            h = h.to(torch.get_autocast_dtype(h.device.type))
        total = CrossEntropy.apply(h, weight, targets.flatten(), torch.is_grad_enabled())
        return total / (targets >= 0).sum() if reduction == "mean" else total

    def forward(self, idx, targets=None, n_loops=None):
        """
        Token ids (B, T) -> (logits (B, T, vocab_size), None) after n_loops loops (default: config.mean_loops). With targets
        (B, T): (None, their mean cross-entropy in nats), where a target of -1 is not counted; see `loss`.
        Gradients flow through the last config.backprop_loops loops; the earlier ones only bring the state there.
        """
        n_loops = self.config.mean_loops if n_loops is None else n_loops
        if n_loops < 1:
            raise ValueError(f"n_loops must be at least 1, not {n_loops}")
        e = self.prelude(idx)                                                  # (B, T, d)
        s = self.initial_state(e)                                              # (B, T, d)
        for i in range(n_loops):
            learns = torch.is_grad_enabled() and n_loops - i <= self.config.backprop_loops
            with torch.set_grad_enabled(learns):
                s = self.loop_step(s.requires_grad_() if learns else s, e)     # so all loops compile to one graph
        return (self.readout(s), None) if targets is None else (None, self.loss(s, targets))

    def __getstate__(self):
        return {**self.__dict__, "buckets": {}}            # a copy captures its own graphs

    def flops_per_token(self, T):
        """
        FLOPs of one token in a sequence of T, forward: (prelude, one loop, one readout). Two for each multiply-add
        of the matrix products; attention is counted over all T keys, though kernels may leave out up to half of them.
        """
        c, h = self.config, self.config.n_embd // self.config.n_head
        weights = c.n_embd * (2 * c.n_embd + 2 * c.n_kv_head * h + 3 * c.n_hidden)
        block = 2 * weights + 4 * T * c.n_embd
        adapter = 0 if self.adapter is None else 2 * self.adapter.weight.numel()
        head = 2 * self.wte.weight.numel()
        return c.n_prelude * block, adapter + c.n_core * block, c.n_coda * block + head

    @torch.no_grad()
    def forward_halting(self, idx, rule="kl", eps=1e-3, max_loops=None, mode="skip", schedule=None):
        """
        Let each token stop at the first loop whose signal is below eps, at most max_loops (default:
        config.mean_loops). Token ids (B, T) -> logits (B, T, vocab_size), depth (B, T) in loops.

        rule   "kl", "state" or "accel": see Halting.
        mode   "select": all loops run for all tokens, and a token's output is read at its depth.
               "freeze": from its depth on a token's state, and its keys and values in every core block, stay as
               they were in its last active loop, while the others go on attending to them. `state` and `accel`
               read out once, at the end. With `kl` a token's output is the distribution that passed its check,
               and its keys and values in the coda freeze with it.
               "skip": the same function as "freeze", computed on active tokens only.
        schedule (B, T): halt at these depths instead, at the rule's usual cost; for timing.
        Raises ValueError for a rule, mode, eps or max_loops that does not exist.
        """
        max_loops = self.config.mean_loops if max_loops is None else max_loops
        if mode not in ("select", "freeze", "skip"):
            raise ValueError(f"mode must be 'select', 'freeze' or 'skip', not {mode!r}")
        if max_loops < 1:
            raise ValueError(f"max_loops must be at least 1, not {max_loops}")
        halting = Halting(rule, eps, schedule)
        if mode == "skip":
            out, depth = self._skip_captured(idx, halting, max_loops) if idx.is_cuda else self._skip(idx, halting, max_loops)[:2]
            return out if halting.reads else self.readout(out), depth
        return self._mask(idx, halting, max_loops, freeze=mode == "freeze")

    @torch.no_grad()
    def prefill(self, idx, cache, slot, rule, eps, max_loops):
        """
        A prompt idx (n,) with the mode `skip` -> depth (n,). Its keys and values, of each token's last loop, go to
        positions 0 .. n - 1 of a slot of the cache, one sample.Cached for each prelude, core and coda block.
        """
        halting, prelude = Halting(rule, eps), [Frozen() for _ in self.prelude_blocks]
        out, depth, attend = self._skip(idx[None], halting, max_loops, prelude)
        if not halting.reads:                              # the coda has not seen the prompt yet
            coda = [Frozen() for _ in self.coda_blocks]
            self.run(self.coda_blocks, out, coda)
            attend = attend[:len(self.core_blocks)] + coda
        for cached, attention in zip(cache, prelude + attend):
            cached.fill(slot, *attention.kept())
        return depth[0]

    def _mask(self, idx, halting, max_loops, freeze):
        """The modes `select` and `freeze`: every loop computes every token, and masks decide what is kept."""
        e = self.prelude(idx)                                                  # (B, T, d)
        s = self.initial_state(e)                                              # (B, T, d)
        active = torch.ones_like(idx, dtype=torch.bool)                        # (B, T)
        depth = torch.full_like(idx, max_loops)                                # (B, T)
        core = [Frozen() for _ in self.core_blocks] if freeze else None
        coda = [Frozen() for _ in self.coda_blocks] if freeze else None
        logits = None                                                          # (B, T, V) once read out
        for i in range(1, max_loops + 1):
            for attend in (core + coda if freeze else ()):
                attend.active = active
            previous, new = s, self.loop_step(s, e, core)
            s = torch.where(active[..., None], new, s) if freeze else new
            if halting.reads or not freeze:
                read = self.readout(s, coda)
                logits = read if logits is None else torch.where(active[..., None], read, logits)
            halts = active & halting(s, previous, logits)
            depth = torch.where(halts, i, depth)
            active = active & ~halts
            if freeze and not active.any():
                break
        return self.readout(s) if logits is None else logits, depth

    def _skip(self, idx, halting, max_loops, prelude=None):
        """
        The mode `skip`: `rows` are the active tokens among all B * T, and s, e, rope and what the halting rule
        remembers hold those rows only. Who halts leaves its state (or with `kl` its logits), and its keys and
        values stay where later queries find them. -> what was left (B, T, d or V), depth (B, T), and the attention
        of the core and coda blocks, which has the keys and values.
        """
        B, T = idx.shape
        e = self.prelude(idx, prelude)
        s = self.initial_state(e).flatten(0, 1)                                # (N, d), at first N = B T
        e, rope = e.flatten(0, 1), [table.repeat(B, 1, 1) for table in self.rope(T)]
        rows = torch.arange(B * T, device=idx.device)                          # (N,)
        depth = torch.empty_like(rows)
        queries = Queries(B, T)
        core = [Skipping(queries) for _ in self.core_blocks]
        coda = [Skipping(queries) for _ in self.coda_blocks]
        out = None                                                             # (B T, d), with `kl` (B T, V)
        for i in range(1, max_loops + 1):
            queries.place(rows)
            previous, s = s, self.loop_step(s, e, core, rope)
            result = self.readout(s, coda, rope) if halting.reads else s
            out = torch.empty_like(result) if out is None else out             # all tokens run loop 1
            halts = halting(s, previous, result)
            stop = halts.nonzero()[:, 0] if i < max_loops else torch.arange(len(rows), device=idx.device)
            if len(stop) == 0:
                continue
            out[rows[stop]], depth[rows[stop]] = result[stop], i
            if len(stop) == len(rows):
                break
            stay = (~halts).nonzero()[:, 0]
            rows, s, e, *rope = (x[stay] for x in (rows, s, e, *rope))
            halting.keep(stay)
        return out.view(B, T, -1), depth.view(B, T), core + coda

    def _skip_captured(self, idx, halting, max_loops, late=0):
        """The same by replaying captured loop steps over padded sizes, see Buckets. -> what was left, depth."""
        key = (*idx.shape, halting.rule, *(p.data_ptr() for p in self.parameters()))
        if key not in self.buckets:                        # graphs of other shapes, or of weights that have moved, make room
            self.buckets = {k: v for k, v in self.buckets.items() if k[:2] + k[3:] == key[:2] + key[3:]}
            self.buckets[key] = Buckets(self, halting.rule, *idx.shape)
        e = self.prelude(idx)
        return self.buckets[key](e, self.initial_state(e), halting.eps, max_loops, halting.schedule, late)


def truncated_normal_(x, std, generator=None):
    """Fill x from N(0, std^2), cut at three standard deviations."""
    return nn.init.trunc_normal_(x, 0.0, std, -3 * std, 3 * std, generator)


def load_checkpoint(path, device="cpu"):
    """A checkpoint of train.py -> (LoopLM in evaluation mode, the checkpoint: a dict of plain types and tensors)."""
    checkpoint = torch.load(path, map_location=device, weights_only=True, mmap=True)
    model = LoopLM(LoopConfig(**checkpoint["config"])).to(device)
    model.load_state_dict(checkpoint["model"])
    return model.eval(), checkpoint


# ---------------------------------------------------------------------------------------------------------
# halting

def kl_signal(logits, previous):
    """
    KL(p_i || p_{i-1}) in nats of two readouts (..., V) -> (...), float32.

    Summed as p_i d + p_{i-1} - p_i, where d = log p_i - log p_{i-1}. That is the same number, since both distributions
    sum to one, but no term is negative. Where d is small, the term is p_i (expm1(-d) + d), of second order: the plain
    sum of p_i d cancels in first order and drowns near 1e-7 in rounding, above what a converged token reaches.
    """
    rows = max(1, 2**18 // logits.shape[-1])
    if not logits.is_cuda and logits.shape[:-1].numel() > rows:                # on a CPU a few rows at a time, in its cache
        pairs = zip(logits.flatten(0, -2).split(rows), previous.flatten(0, -2).split(rows))
        return torch.cat([kl_signal(*pair) for pair in pairs]).view(logits.shape[:-1])
    log_p, log_q = F.log_softmax(logits.float(), dim=-1), F.log_softmax(previous.float(), dim=-1)
    p, d = log_p.exp(), log_p - log_q
    return torch.where(d.abs() < 1, p * (torch.expm1(-d) + d), p * d + log_q.exp() - p).sum(-1).clamp_min(0)


def state_signal(s, previous):
    """||s_i - s_{i-1}|| / ||s_i|| of two states (..., d) -> (...), float32."""
    return torch.linalg.vector_norm(s.float() - previous.float(), dim=-1) / torch.linalg.vector_norm(s.float(), dim=-1)


def accel_signal(s, previous, before):
    """||(s_i - s_{i-1}) - (s_{i-1} - s_{i-2})|| / ||s_i|| of three states (..., d) -> (...), float32."""
    change = s.float() - 2 * previous.float() + before.float()
    return torch.linalg.vector_norm(change, dim=-1) / torch.linalg.vector_norm(s.float(), dim=-1)


class Halting:
    """
    A rule that needs no training, loop by loop: which tokens' signal fell below eps? It remembers what the signal
    compares with. `kl` and `accel` are first defined at loop 2; `accel` asks for two hits in a row.
    """

    def __init__(self, rule, eps, schedule=None):
        if rule not in ("kl", "state", "accel"):
            raise ValueError(f"rule must be 'kl', 'state' or 'accel', not {rule!r}")
        if not eps >= 0:
            raise ValueError(f"eps must be at least 0, not {eps}")
        self.rule, self.eps, self.loop, self.schedule = rule, eps, 0, schedule
        self.reads = rule == "kl"                          # does a check cost a readout?
        self.memory = None                                 # `kl`: logits; `accel`: the state before, and who hit

    def __call__(self, s, previous, logits=None):
        """s_i, s_{i-1} (..., d), for `kl` also logits_i (..., V) -> (...) bool."""
        self.loop += 1
        if self.rule == "state":
            halts = state_signal(s, previous) < self.eps
        elif not self.memory:
            halts = torch.zeros(s.shape[:-1], dtype=torch.bool, device=s.device)
            self.memory = (logits,) if self.reads else (previous, halts)
        elif self.reads:
            halts = kl_signal(logits, *self.memory) < self.eps
            self.memory = (logits,)
        else:
            before, hit_before = self.memory
            hit = accel_signal(s, previous, before) < self.eps
            halts = hit & hit_before
            self.memory = previous, hit
        return halts if self.schedule is None else self.schedule.reshape(halts.shape) == self.loop

    def blank_memory(self, s, logits=None):
        """Memory that compares with nothing: no signal falls below eps against it. s (..., d), for `kl` logits (..., V)."""
        nothing = torch.full_like(logits if self.reads else s, math.nan)
        return {"kl": (nothing,), "state": (), "accel": (nothing, s.new_zeros(s.shape[:-1], dtype=torch.bool))}[self.rule]

    def keep(self, rows):
        """From now on only these of the tokens are asked about."""
        self.memory = self.memory and tuple(x[rows] for x in self.memory)
        self.schedule = None if self.schedule is None else self.schedule.flatten()[rows]


class Frozen:
    """Attention of one block in the mode `freeze`: only active tokens renew their keys and values."""
    active = k = v = None                                                      # active (B, T), k and v (B, T, H_kv, h)

    def __call__(self, q, k, v):
        if self.k is not None:
            renew = self.active[..., None, None]
            k, v = torch.where(renew, k, self.k), torch.where(renew, v, self.v)
        self.k, self.v = k, v
        return causal_attention(q, k, v)

    def kept(self):
        return self.k, self.v


class Queries:
    """Where the active tokens of a loop stand in (B, Q): sequence by sequence, in order, padded to the longest of them."""

    def __init__(self, B, T):
        self.B, self.T = B, T

    def place(self, rows):
        """rows (N,), ascending: the active tokens among B * T."""
        self.all = len(rows) == self.B * self.T
        if self.all:
            return
        self.b, self.t = rows // self.T, rows % self.T
        counts = self.b.bincount(minlength=self.B)                             # (B,)
        self.slot = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[self.b]
        Q = int(counts.max())
        last, first = torch.zeros(2, self.B, Q, dtype=torch.long, device=rows.device)
        last[self.b, self.slot] = self.t                                       # padding stands at 0, and is not read
        first += self.T
        first[self.b, self.slot] = self.t
        low, high = first.amin(0).tolist(), last.amax(0).cummax(0).values.tolist()               # by row
        self.at, self.blocks = last, [(i, end, low[i], high[end - 1] + 1) for i, end in row_blocks(Q)]


class Skipping:
    """Attention of one block in the mode `skip`: queries of active tokens, keys and values of all, the last of each."""

    def __init__(self, queries):
        self.queries, self.dense, self.k, self.v = queries, None, None, None   # k and v (B, H_kv, T, h)

    def __call__(self, q, k, v):                                               # (N, H, h), (N, H_kv, h) twice
        at = self.queries
        if at.all:
            q, *self.dense = (x.unflatten(0, (at.B, at.T)) for x in (q, k, v))
            return causal_attention(q, *self.dense).flatten(0, 1)
        if self.k is None:                                 # the first tokens have halted
            self.k, self.v = (x.transpose(1, 2).contiguous() for x in self.dense)
        self.k[at.b, :, at.t], self.v[at.b, :, at.t] = k, v
        padded = q.new_zeros(at.B, at.at.shape[1], *q.shape[1:])               # (B, Q, H, h)
        padded[at.b, at.slot] = q
        y = attention(padded.transpose(1, 2), self.k, self.v, at.at, at.blocks)                  # (B, H, Q, h)
        return y.transpose(1, 2)[at.b, at.slot]                                # (N, H, h)

    def kept(self):
        """-> k and v (B, T, H_kv, h)."""
        return self.dense if self.k is None else (self.k.transpose(1, 2), self.v.transpose(1, 2))


# ---------------------------------------------------------------------------------------------------------
# the captured loop step

class LoopStep:
    """
    One loop of N tokens in B sequences as a function in place over buffers that never move or change their size, so that a
    GPU can record it once (a CUDA graph) and replay it without Python. Elsewhere `replay` calls the function itself.

    s, e (N, d)       state and injection of each token, with its row of the rope table
    b, t (N,)         its sequence and position: where its keys and values go, and how far it sees
    column (N,)       where its query stands among those of its sequence, (B, columns) in all
    active (N,)       False: nothing about this token changes any more; its state is where it halted
    loops (N,)        how many it has had: once it has halted, its depth
    count (B,)        active tokens of each sequence; every replay sends it to the host, which may read it late

    keys: (k, v), (B, H_kv, T, h) each, for each block of the core, and of the coda if the rule reads out.
    """

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, model, rule, N, columns, keys, pool=None):
        c, like, self.device = model.config, model.wte.weight, model.wte.weight.device
        self.model, self.halting, self.columns = model, Halting(rule, 0.0), columns
        self.B, _, self.T, h = keys[0][0].shape
        self.dense = N == self.B * self.T and columns == self.T                # all tokens of all sequences, in order
        self.core, self.coda = ([partial(self.attend, *kv) for kv in part] for part in (keys[:c.n_core], keys[c.n_core:]))
        self.s, self.e = like.new_zeros(2, N, c.n_embd)
        self.rope = torch.zeros(2, N, 1, h, device=self.device)
        self.b, self.t, self.column, self.loops, self.schedule = torch.zeros(5, N, dtype=torch.long, device=self.device)
        self.b.copy_(torch.arange(N, device=self.device) % self.B)             # no two tokens ever stand at one place: each writes there
        self.active = torch.zeros(N, dtype=torch.bool, device=self.device)
        logits = like.new_zeros(N, c.vocab_size) if self.halting.reads else None
        self.result = self.s if logits is None else logits                     # what a token leaves when it halts
        self.memory = self.halting.blank_memory(self.s, logits)
        self.eps, self.max_loops = torch.zeros(2, device=self.device)          # see `limit`
        self.halting.eps = self.eps
        # Query heads that share a key head are stacked as more rows, whose mask is therefore repeated.
        self.visible = torch.zeros(self.B, 1, c.n_head // c.n_kv_head, columns, self.T, dtype=torch.bool, device=self.device)
        self.count = torch.zeros(self.B, dtype=torch.long, pin_memory=self.device.type == "cuda")
        self.graph, self.pool, self.replays = None, pool, []

    def limit(self, eps, max_loops):
        self.eps.fill_(min(eps, torch.finfo(torch.float32).max))
        self.max_loops.fill_(max_loops)

    def step(self):
        """One loop of the active tokens, in place."""
        logits, active = None, self.active
        rope = self.rope.unbind()
        new = self.model.loop_step(self.s, self.e, self.core, rope)
        if self.halting.reads:
            logits = self.model.readout(new, self.coda, rope)
            self.result.copy_(torch.where(active[:, None], logits, self.result))
        self.halting.memory = self.memory
        below = self.halting(new, self.s, logits)
        for bank, value in zip(self.memory, self.halting.memory or ()):
            bank.copy_(value)
        self.halting.memory = None
        self.s.copy_(torch.where(active[:, None], new, self.s))
        self.loops += active
        halts = torch.where(self.schedule > 0, self.loops >= self.schedule, below) | (self.loops >= self.max_loops)
        active &= ~halts
        count = torch.zeros(self.B, dtype=torch.long, device=self.device).index_add_(0, self.b, active.long())
        self.count.copy_(count, non_blocking=True)

    def attend(self, k_all, v_all, q, k, v):
        """Attention of one block: active tokens leave their keys and values, all see what their sequence has left so far."""
        if self.dense:
            q, k, v = (x.unflatten(0, (self.B, self.T)) for x in (q, k, v))                      # (B, T, heads, h)
            renew, kept = self.active.view(self.B, self.T, 1, 1), [x.transpose(1, 2) for x in (k_all, v_all)]
            for old, new in zip(kept, (k, v)):
                old.copy_(torch.where(renew, new, old))
            return causal_attention(q, *kept).flatten(0, 1)
        for old, new in ((k_all, k), (v_all, v)):
            old[self.b, :, self.t] = torch.where(self.active[:, None, None], new, old[self.b, :, self.t])
        rows = q.new_zeros(self.B, self.columns, *q.shape[1:])                 # (B, columns, H, h)
        rows[self.b, self.column] = q
        rows = rows.transpose(1, 2).reshape(self.B, k.shape[1], -1, q.shape[2])                  # (B, H_kv, share * columns, h)
        y = F.scaled_dot_product_attention(rows, k_all, v_all, self.visible.flatten(2, 3))
        return y.reshape(self.B, q.shape[1], self.columns, -1)[self.b, :, self.column]           # (N, H, h)

    @torch.no_grad()
    def replay(self):
        if self.device.type != "cuda":
            return self.step()
        if self.graph is None:
            self.capture()
        self.graph.replay()
        self.replays = [*self.replays[-1:], torch.cuda.Event()]
        self.replays[-1].record()

    def capture(self):
        """Record `step`. The runs that warm up must not be seen: nobody is active meanwhile, and what they do write is put back."""
        gc.collect()                                       # what dies during a capture could spoil it
        kept = [(x, x.clone()) for x in (self.active, self.count, *self.memory)]
        self.active.zero_()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.step()
            self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            self.step()
        torch.cuda.synchronize()
        for x, before in kept:
            x.copy_(before)
        self.graph = graph

    def forget(self, rows):
        """What the rule remembers of these tokens compares with nothing."""
        for bank in self.memory:
            bank[rows] = False if bank.dtype == torch.bool else math.nan

    def put(self, slots, b, t, rope, depths):
        """
        In decoding, where each sequence has one token: those of sequences b (n,), also as a list, stand at positions t (n,), with
        rope (2, n, 1, h), and begin to loop; depths, if not None: a list of where to halt instead.
        """
        self.t[b], self.rope[:, b] = t, rope
        self.visible[b] = (torch.arange(self.T, device=self.device) <= t[:, None])[:, None, None, None]
        self.schedule[b] = 0 if depths is None else torch.tensor(depths, device=self.device).clamp_min(1)
        self.active[b], self.loops[b] = True, 0
        self.forget(b)
        self.wait()
        self.count[slots] = 1

    def wait(self):
        """Until no replay has a word in `count` any more."""
        for replay in self.replays:
            replay.synchronize()
        self.replays = []

    def start(self, count):
        """Before other tokens' first replay: so many of each sequence are active."""
        self.wait()
        self.count.copy_(count)

    def counts(self, late=1):
        """
        Active tokens of each sequence, numpy (B,), after the last replay (late = 0) or the one before it, or later: never fewer than
        there are now. With late = 1 the GPU has a replay before it while the host reads. One loop too many does no harm.
        """
        if len(self.replays) > late:
            self.replays[-1 - late].synchronize()
        return self.count.numpy().copy()                   # the next replay writes there


class Buckets:
    """The mode `skip` by captured steps: as tokens halt, the others move to smaller and smaller buffers."""

    @torch.inference_mode(False)
    @torch.no_grad()
    def __init__(self, model, rule, B, T):
        c, reads = model.config, rule == "kl"
        h = c.n_embd // c.n_head
        self.model, self.rule, self.B, self.T, self.steps = model, rule, B, T, {}
        self.pool = torch.cuda.graph_pool_handle() if model.wte.weight.is_cuda else None           # the graphs never run side by side
        self.keys = [model.wte.weight.new_zeros(2, B, c.n_kv_head, T, h).unbind() for _ in range(c.n_core + reads * c.n_coda)]

    def step(self, N, columns):
        if (N, columns) not in self.steps:
            self.steps[N, columns] = LoopStep(self.model, self.rule, N, columns, self.keys, self.pool)
        return self.steps[N, columns]

    @torch.no_grad()
    def __call__(self, e, s, eps, max_loops, schedule=None, late=0):
        """
        e and s_0 (B, T, d), depths (B, T) to halt at instead -> what the tokens left (B, T, d or V), depth (B, T).
        late: see LoopStep.counts. Here a loop of all those who have just halted costs more than the host's short wait.
        """
        N = self.B * self.T
        rows = torch.arange(N, device=e.device)            # which of all tokens the step has
        step = self.step(N, self.T)
        step.limit(eps, max_loops)
        step.s.copy_(s.flatten(0, 1)), step.e.copy_(e.flatten(0, 1))
        step.b.copy_(rows // self.T), step.t.copy_(rows % self.T)
        step.rope.copy_(torch.stack(self.model.rope(self.T))[:, step.t])
        step.active.fill_(True), step.loops.zero_()
        step.start(torch.full((self.B,), self.T))
        step.schedule.zero_() if schedule is None else step.schedule.copy_(schedule.flatten().clamp_min(1))
        step.forget(slice(None))
        out, depth = torch.empty_like(step.result), torch.empty_like(step.loops)
        while True:
            step.replay()
            counts = step.counts(late)
            smaller = bucket(counts.sum(), N), bucket(counts.max(), self.T) + 1
            if counts.any() and smaller[0] == len(rows):
                continue
            out[rows], depth[rows] = step.result, step.loops
            if not counts.any():
                return out.view(self.B, self.T, -1), depth.view(self.B, self.T)
            step, rows = self.move(step, rows, self.step(*smaller))
            step.limit(eps, max_loops)

    def move(self, old, rows, new):
        """The active tokens of one step, and as many of the halted as fill it up, to a smaller one."""
        keep = (~old.active).long().argsort(stable=True)[:len(new.s)]
        for name in ("s", "e", "b", "t", "active", "loops", "schedule", "result"):
            getattr(new, name).copy_(getattr(old, name)[keep])
        new.rope.copy_(old.rope[:, keep])
        for bank, before in zip(new.memory, old.memory):
            bank.copy_(before[keep])
        new.start(old.count)
        # One column after the other for the tokens of a sequence, the active first; the last takes who finds none.
        mine = new.b[:, None] == torch.arange(self.B, device=new.device)                         # (N, B)
        place = mine.cumsum(0).gather(1, new.b[:, None])[:, 0] - 1
        new.column.copy_(place.clamp_max(new.columns - 1))
        at = torch.zeros(self.B, new.columns, dtype=torch.long, device=new.device)
        at[new.b, new.column] = new.t
        new.visible.copy_((torch.arange(self.T, device=new.device) <= at[..., None])[:, None, None])
        return new, rows[keep]


def bucket(count, whole, parts=16):
    """The next size that holds so many: a multiple of a sixteenth."""
    part = -(-whole // parts)
    return min(whole, -(-int(count) // part) * part)
