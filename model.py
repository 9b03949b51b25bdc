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

import math
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
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

    def readout(self, s, attend=None, rope=None):
        """The next-token logits that a state stands for: s (B, T, d) -> (B, T, vocab_size)."""
        logits = F.linear(self.norm(self.run(self.coda_blocks, s, attend, rope)), self.wte.weight)
        return logits[..., :self.config.vocab_size]        # the padded rows can never be predicted

    def forward(self, idx, targets=None, n_loops=None):
        """
        Token ids (B, T) -> logits (B, T, vocab_size) after n_loops loops (default: config.mean_loops), and the mean
        cross-entropy in nats against targets (B, T), where -1 is not counted; None without targets.
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
        logits = self.readout(s)                                               # (B, T, V)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)

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
            out, depth, _ = self._skip(idx, halting, max_loops)
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
