"""model.py against manual unrolls, a naive loop over tokens and float64."""

import math
import random

import pytest
import torch
from torch.nn import functional as F

import model as M
from model import CrossEntropy, Halting, LoopConfig, LoopLM, LoopStep, accel_signal, bucket, kl_signal, state_signal

TINY = dict(block_size=24, vocab_size=97, n_embd=32, n_head=4, n_kv_head=2, n_hidden=48, n_prelude=1, n_core=2, n_coda=1,
            mean_loops=4)
RULES = ("kl", "state", "accel")


def make(seed=0, **changes):
    """A random model whose tokens converge at different depths: larger output projections keep the loop moving."""
    torch.manual_seed(seed)
    model = LoopLM(LoopConfig(**{**TINY, **changes})).eval()
    for name, p in model.named_parameters():
        if "out" in name:
            p.data *= 2
    return model


def tokens(B=3, T=20, seed=1):
    return torch.randint(0, TINY["vocab_size"], (B, T), generator=torch.Generator().manual_seed(seed))


def spread_eps(model, idx, rule, max_loops=8):
    """A threshold at which this rule's exits are spread over the loops, and on which no token's signal sits by chance."""
    with torch.no_grad():
        e = model.prelude(idx)
        states = [model.initial_state(e)]
        for _ in range(max_loops):
            states.append(model.loop_step(states[-1], e))
        if rule == "kl":
            read = [model.readout(s) for s in states[1:]]
            signals = [kl_signal(b, a) for a, b in zip(read, read[1:])]
        elif rule == "state":
            signals = [state_signal(b, a) for a, b in zip(states, states[1:])]
        else:
            signals = [accel_signal(c, b, a) for a, b, c in zip(states, states[1:], states[2:])]
    values = signals[len(signals) // 2].flatten().sort().values
    values = values[len(values) // 3:len(values) * 2 // 3 + 1]
    if len(values) < 2:
        return values.item() * 1.01
    widest = (values[1:] / values[:-1]).argmax()
    return (values[widest] * values[widest + 1]).sqrt().item()


@pytest.fixture(params=[("linear", "normal"), ("add", "zeros"), ("add", "normal")], ids=str)
def model(request):
    return make(injection=request.param[0], state_init=request.param[1])


@pytest.mark.parametrize("n_loops", [1, 3, 7])
def test_forward_equals_a_manual_unroll(model, n_loops):
    """Oracle: the four methods, called by hand."""
    idx = tokens()
    e = model.prelude(idx)
    s = model.initial_state(e)
    for _ in range(n_loops):
        s = model.loop_step(s, e)
    logits, loss = model(idx, n_loops=n_loops)[0], model(idx, idx.roll(-1, 1), n_loops)[1]
    assert torch.equal(logits, model.readout(s))
    p = logits.double().softmax(-1).gather(-1, idx.roll(-1, 1)[..., None])
    assert loss.item() == pytest.approx(-p.log().mean().item(), abs=1e-5)


def test_ignored_targets_do_not_count():
    """Oracle: the mean over the other targets, by hand."""
    model, idx = make(), tokens()
    targets = idx.roll(-1, 1)
    targets[:, ::3] = -1
    logits, loss = model(idx)[0], model(idx, targets)[1]
    nll = -logits.log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    assert loss.item() == pytest.approx(nll[targets >= 0].mean().item(), abs=1e-5)


@pytest.mark.parametrize("at_once", [1, 97 * 20, 97 * 25, 2**26])             # parts of 1, 20, 25 and all 50 rows
def test_the_chunked_cross_entropy_equals_the_plain_one(at_once, monkeypatch):
    """Oracle: torch's, in float64, with its gradients; the factor is what gradient accumulation multiplies with."""
    monkeypatch.setattr(CrossEntropy, "at_once", at_once)
    torch.manual_seed(0)
    h, weight, targets = torch.randn(50, 8, requires_grad=True), torch.randn(97, 8, requires_grad=True), torch.randint(0, 97, (50,))
    targets[::3] = -1
    loss = CrossEntropy.apply(h, weight, targets, True) / (targets >= 0).sum()
    (loss / 4).backward()
    double = [x.detach().double().requires_grad_() for x in (h, weight)]
    oracle = F.cross_entropy(double[0] @ double[1].T, targets, ignore_index=-1)
    (oracle / 4).backward()
    assert loss.item() == pytest.approx(oracle.item(), abs=1e-5)
    assert CrossEntropy.apply(h, weight, targets, False).item() == pytest.approx(oracle.item() * (targets >= 0).sum().item(), rel=1e-6)
    for ours, theirs in zip((h, weight), double):
        assert (ours.grad - theirs.grad).norm() < 1e-5 * theirs.grad.norm()


def test_training_computes_what_evaluation_computes_with_the_gradients_of_joint_matrices():
    """Oracle: the model without gradients, whose projections are joint; and in float64 the gradients through torch's own joint product."""
    idx, model = tokens(), make().double()
    with torch.no_grad():
        joint = model(idx)[0]
    assert torch.allclose(model(idx)[0], joint, atol=1e-12)
    gradients = []
    for project in (M.project, lambda x, weight, sizes: F.linear(x, weight).split(sizes, dim=-1)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(M, "project", project)
            gradients.append(torch.autograd.grad(model(idx, idx.roll(-1, 1))[1], list(model.parameters())))
    assert all((a - b).norm() <= 1e-6 * b.norm() for a, b in zip(*gradients))


@pytest.mark.parametrize("n_loops", [1, 2, 5])
def test_no_token_sees_the_future(model, n_loops):
    """Oracle: the same prefix with another continuation gives the same logits."""
    a, b = tokens(), tokens()
    b[:, 11:] = tokens(seed=2)[:, 11:]
    assert torch.allclose(model(a, n_loops=n_loops)[0][:, :11], model(b, n_loops=n_loops)[0][:, :11], atol=1e-5)
    assert not torch.allclose(model(a, n_loops=n_loops)[0][:, 11:], model(b, n_loops=n_loops)[0][:, 11:], atol=1e-2)


@pytest.mark.parametrize("mode", ["select", "freeze", "skip"])
@pytest.mark.parametrize("rule", RULES)
def test_no_token_sees_the_future_when_tokens_halt(rule, mode):
    """Oracle: as above, also for the depths."""
    model, a, b = make(), tokens(), tokens()
    b[:, 11:] = tokens(seed=2)[:, 11:]
    eps = spread_eps(model, a, rule)
    (logits_a, depth_a), (logits_b, depth_b) = (model.forward_halting(x, rule, eps, 8, mode) for x in (a, b))
    assert torch.allclose(logits_a[:, :11], logits_b[:, :11], atol=1e-5)
    assert torch.equal(depth_a[:, :11], depth_b[:, :11])


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("backprop_loops", [1, 2, 5, 9])
def test_gradients_flow_through_the_last_loops_only(backprop_loops):
    """Oracle: an unroll by hand whose state is detached before the last `backprop_loops` loops; all of them if there are fewer."""
    model, idx, n_loops = make(backprop_loops=backprop_loops), tokens(), 5
    targets = idx.roll(-1, 1)
    e = model.prelude(idx)
    s = model.initial_state(e)
    for i in range(n_loops):
        if i == n_loops - backprop_loops:
            s = s.detach()
        s = model.loop_step(s, e)
    oracle = gradients(model, F.cross_entropy(model.readout(s).flatten(0, 1), targets.flatten()))
    ours = gradients(model, model(idx, targets, n_loops)[1])
    assert ours.keys() == oracle.keys()
    for name in oracle:
        assert torch.allclose(ours[name], oracle[name], atol=1e-6), name


def test_halting_signals_equal_float64():
    """Oracle: the textbook formulas in float64, on values from far apart to nearly equal."""
    g = torch.Generator().manual_seed(3)
    a = torch.randn(2, 5, 50, generator=g, dtype=torch.float64)
    for distance in (1.0, 1e-2, 1e-4):
        b = (a + distance * torch.randn(a.shape, generator=g, dtype=torch.float64)).float().double()
        c = (b + distance * torch.randn(a.shape, generator=g, dtype=torch.float64)).float().double()
        a = a.float().double()
        log_p, log_q = b.log_softmax(-1), a.log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        assert torch.allclose(kl_signal(b.float(), a.float()).double(), kl, rtol=2e-2, atol=1e-13)
        assert torch.allclose(state_signal(b.float(), a.float()).double(), (b - a).norm(dim=-1) / b.norm(dim=-1), rtol=1e-3)
        accel = ((c - b) - (b - a)).norm(dim=-1) / c.norm(dim=-1)
        assert torch.allclose(accel_signal(c.float(), b.float(), a.float()).double(), accel, rtol=1e-2)
    far = torch.zeros(2, 50), torch.zeros(2, 50)
    far[0][:, 0], far[1][:, 1] = 150.0, 150.0              # nearly one-hot, on different ids
    log_p, log_q = far[0].double().log_softmax(-1), far[1].double().log_softmax(-1)
    assert torch.allclose(kl_signal(*far).double(), (log_p.exp() * (log_p - log_q)).sum(-1), rtol=1e-5)
    assert (kl_signal(a.float(), a.float()) == 0).all() and (state_signal(a, a) == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_eps_zero_never_halts(model, rule):
    """Oracle: uniform depth. freeze = select = forward at max_loops, even when the state has stopped to move."""
    idx = tokens()
    uniform = model(idx, n_loops=40)[0]
    for mode in ("select", "freeze", "skip"):
        logits, depth = model.forward_halting(idx, rule, 0.0, 40, mode)
        assert (depth == 40).all()
        assert torch.allclose(logits, uniform, atol=1e-5)


@pytest.mark.parametrize("rule, first", [("kl", 2), ("state", 1), ("accel", 3)])
def test_eps_infinite_halts_where_the_signal_is_first_defined(model, rule, first):
    """Oracle: uniform depth at the first loop at which the rule can fire."""
    idx = tokens()
    for mode in ("select", "freeze", "skip"):
        logits, depth = model.forward_halting(idx, rule, math.inf, 8, mode)
        assert (depth == first).all()
        assert torch.allclose(logits, model(idx, n_loops=first)[0], atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_select_reads_the_uniform_loops(model, rule):
    """Oracle: every uniform depth computed apart, the rule applied token by token."""
    idx, max_loops = tokens(), 8
    eps = spread_eps(model, idx, rule)
    logits, depth = model.forward_halting(idx, rule, eps, max_loops, "select")
    e = model.prelude(idx)
    states = [model.initial_state(e)]
    for _ in range(max_loops):
        states.append(model.loop_step(states[-1], e))
    read = [model.readout(s) for s in states]
    for b in range(idx.shape[0]):
        for t in range(idx.shape[1]):
            hits = 0
            for i in range(1, max_loops + 1):
                if rule == "state":
                    signal = state_signal(states[i][b, t], states[i - 1][b, t])
                elif i == 1:
                    continue
                elif rule == "kl":
                    signal = kl_signal(read[i][b, t], read[i - 1][b, t])
                else:
                    signal = accel_signal(states[i][b, t], states[i - 1][b, t], states[i - 2][b, t])
                hits = hits + 1 if signal < eps else 0
                if hits == (2 if rule == "accel" else 1):
                    break
            assert depth[b, t] == i
            assert torch.allclose(logits[b, t], read[i][b, t], atol=1e-5)


@torch.no_grad()
def naive_freeze(model, idx, rule, eps, max_loops, prompt=None):
    """
    One sequence, token by token, in float64: each block keeps a list of keys and values that halted tokens no longer renew.
    prompt: only the first so many tokens loop together; each later one begins when all before it have halted.
    """
    T, c = len(idx), model.config
    h, share = c.n_embd // c.n_head, c.n_head // c.n_kv_head

    def rms(norm, x):
        return x / (x.square().mean() + 1e-6).sqrt() * norm.weight

    def rope(x, t):                                        # (heads, h)
        angle = t * 10000.0 ** (-torch.arange(0, h, 2, dtype=torch.float64) / h)
        a, b = x[:, :h // 2], x[:, h // 2:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def run(blocks, stores, x, who):
        """x: {t: (d,)} of the tokens in `who` -> the same after the blocks."""
        for block, store in zip(blocks, stores):
            q = {}
            for t in who:
                qkv = (block.qkv.weight @ rms(block.norm1, x[t])).view(-1, h)
                q[t] = rope(qkv[:c.n_head], t)
                store[t] = rope(qkv[c.n_head:-c.n_kv_head], t), qkv[-c.n_kv_head:]
            y = {}
            for t in who:
                heads = []
                for head in range(c.n_head):
                    keys = torch.stack([store[u][0][head // share] for u in range(t + 1)])
                    values = torch.stack([store[u][1][head // share] for u in range(t + 1)])
                    heads.append((keys @ q[t][head] * h ** -0.5).softmax(0) @ values)
                z = rms(block.norm2, block.attn_out.weight @ torch.cat(heads) + x[t])
                gate, up = (block.gate_up.weight @ rms(block.norm3, z)).chunk(2)
                y[t] = rms(block.norm4, block.mlp_out.weight @ (F.silu(gate) * up) + z)
            x = y
        return x

    def read(stores, s, who):
        x = run(model.coda_blocks, stores, s, who)
        return {t: model.wte.weight[:c.vocab_size] @ rms(model.norm, x[t]) for t in who}

    e = model.prelude(idx[None])[0]
    s = dict(enumerate(model.initial_state(e[None])[0]))
    core, coda = [{} for _ in model.core_blocks], [{} for _ in model.coda_blocks]
    depth, logits, history, hits = {}, {}, {t: [s[t]] for t in range(T)}, dict.fromkeys(range(T), 0)
    for wave in [range(T)] if prompt is None else [range(prompt), *([t] for t in range(prompt, T))]:
        active = list(wave)
        for i in range(1, max_loops + 1):
            x = {t: s[t] + e[t] if model.adapter is None else model.adapter.weight @ torch.cat((s[t], e[t])) for t in active}
            s.update(run(model.core_blocks, core, x, active))
            before = dict(logits)
            if rule == "kl":
                logits.update(read(coda, s, active))
            for t in list(active):
                history[t].append(s[t])
                depth[t] = i
                if rule == "kl":
                    signal = kl_signal(logits[t], before[t]) if i > 1 else math.inf
                elif rule == "state":
                    signal = (s[t] - history[t][-2]).norm() / s[t].norm()
                else:
                    signal = (s[t] - 2 * history[t][-2] + history[t][-3]).norm() / s[t].norm() if i > 1 else math.inf
                hits[t] = hits[t] + 1 if signal < eps else 0
                if hits[t] == (2 if rule == "accel" else 1):
                    active.remove(t)
        if rule != "kl":
            logits.update(read(coda, s, wave))
    return torch.stack([logits[t] for t in range(T)]), torch.tensor([depth[t] for t in range(T)])


@pytest.mark.parametrize("rule", RULES)
def test_freeze_equals_a_naive_loop_over_tokens(model, rule):
    """Oracle: `naive_freeze`, which shares no attention, no masking and no bookkeeping with the model."""
    model = model.double()
    idx = tokens(2, 12)
    eps = spread_eps(model, idx, rule)
    with torch.no_grad():
        logits, depth = model.forward_halting(idx, rule, eps, 8, "freeze")
        assert len(depth.unique()) > 1
        for b in range(len(idx)):
            oracle_logits, oracle_depth = naive_freeze(model, idx[b], rule, eps, 8)
            assert torch.equal(depth[b], oracle_depth)
            assert torch.allclose(logits[b], oracle_logits, atol=1e-4)


@pytest.mark.parametrize("mode", ["select", "freeze", "skip"])
@pytest.mark.parametrize("rule", RULES)
def test_a_token_does_not_depend_on_its_company(rule, mode):
    """Oracle: each sequence alone, and the batch in another order."""
    model, idx = make(), tokens(4)
    eps = spread_eps(model, idx, rule)
    logits, depth = model.forward_halting(idx, rule, eps, 8, mode)
    order = torch.tensor([2, 0, 3, 1])
    for rows in [order] + [torch.tensor([b]) for b in range(4)]:
        other_logits, other_depth = model.forward_halting(idx[rows], rule, eps, 8, mode)
        assert torch.equal(other_depth, depth[rows])
        assert torch.allclose(other_logits, logits[rows], atol=1e-5)
    assert torch.allclose(model(idx)[0][order], model(idx[order])[0], atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("trial", range(12))
def test_skip_equals_freeze(rule, trial):
    """Oracle: `freeze`, itself held against the naive loop; random shapes, kinds, batches, thresholds and ragged activity."""
    g = random.Random(f"{rule} {trial}")
    model = make(trial, injection=g.choice(("linear", "add")), state_init=g.choice(("normal", "zeros")), n_coda=g.choice((0, 1, 2)),
                 n_core=g.choice((1, 2)), n_prelude=g.choice((0, 1)), n_kv_head=g.choice((1, 2, 4)))
    idx = tokens(g.choice((1, 2, 5)), g.choice((1, 2, 7, 24)), seed=trial)
    if trial % 3 == 0:                                     # a sequence of one repeated token, which settles at another pace
        idx[0] = idx[0, 0]
    eps = g.choice((0.0, math.inf, *[spread_eps(model, idx, rule) * g.choice((0.3, 1.0, 3.0))] * 4))
    max_loops = g.choice((1, 2, 3, 9))
    frozen, frozen_depth = model.forward_halting(idx, rule, eps, max_loops, "freeze")
    skipped, skipped_depth = model.forward_halting(idx, rule, eps, max_loops, "skip")
    assert torch.equal(frozen_depth, skipped_depth)
    assert torch.allclose(frozen, skipped, atol=1e-4)


@pytest.fixture
def late_counts(monkeypatch):
    """On a CPU a loop step's counts are never late; here they are those of earlier replays, as on a GPU that is behind."""
    replay, wait = LoopStep.replay, LoopStep.wait

    def forgetting(step):
        wait(step)
        step.past = []

    def remembering(step):
        step.past = step.past or [step.count.clone()]
        replay(step)
        step.past.append(step.count.clone())

    monkeypatch.setattr(LoopStep, "wait", forgetting)
    monkeypatch.setattr(LoopStep, "replay", remembering)
    monkeypatch.setattr(LoopStep, "counts", lambda step, late=1: step.past[max(0, len(step.past) - 1 - late)].numpy())


@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_the_captured_loop_step_equals_skip(model, rule, late, late_counts):
    """
    Oracle: `skip` as it runs on a CPU, one exact size after the other. The same buffers twice, for other tokens; many sequences,
    few tokens, one; thresholds, and a schedule; what is in no buffer's place yet must not matter.
    """
    for trial, (B, T) in enumerate(((3, 20), (3, 20), (40, 3), (1, 1), (2, 24))):
        idx = tokens(B, T, seed=trial)
        schedule = torch.randint(1, 10, (B, T), generator=torch.Generator().manual_seed(trial))
        for eps, drawn in ((spread_eps(model, idx, rule), None), (0.0, None), (1e9, None), (0.0, schedule)):
            with torch.no_grad():
                out, depth, _ = model._skip(idx, Halting(rule, eps, drawn), 8)
                ours, ours_depth = model._skip_captured(idx, Halting(rule, eps, drawn), 8, late)
            assert torch.equal(depth, ours_depth) and torch.allclose(out, ours, atol=1e-4)
        assert T == 1 or len(next(iter(model.buckets.values())).steps) > 3     # it does get smaller


def test_a_loop_step_changes_nothing_of_those_who_have_halted():
    """Oracle: all buffers as they were, to the last bit; this is also why a graph may be warmed up at any time."""
    model, idx = make(), tokens(3, 20)
    with torch.inference_mode():
        model._skip_captured(idx, Halting("kl", 1e-3), 8)
        buckets = next(iter(model.buckets.values()))
        for step in buckets.steps.values():
            step.active.zero_()
            before = [x.clone() for x in (step.s, step.result, step.loops, step.b, step.t, *(x for kv in buckets.keys for x in kv))]
            step.step()
            after = step.s, step.result, step.loops, step.b, step.t, *(x for kv in buckets.keys for x in kv)
            assert all(torch.equal(a, b) for a, b in zip(before, after)) and not step.count.any()


@pytest.mark.cuda
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype, atol", [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_replayed_graphs_equal_eager_skip_on_a_gpu(dtype, atol, rule, late):
    """Oracle: the eager loop there; the same depths (drawn, in bfloat16, whose signals sit on thresholds), and no hidden synchronisation."""
    torch.set_float32_matmul_precision("highest")
    model, idx = make(block_size=64).to("cuda", dtype), tokens(4, 64).cuda()
    schedule = None if dtype == torch.float32 else torch.randint(1, 9, (4, 64), generator=torch.Generator().manual_seed(0)).cuda()
    eps = spread_eps(model, idx, rule) if schedule is None else 0.0
    with torch.no_grad():
        out, depth, _ = model._skip(idx, Halting(rule, eps, schedule), 8)
        for again in range(8):                             # captures; which sizes a late count asks for depends on the time
            first = model._skip_captured(idx, Halting(rule, eps, schedule), 8, late)[1]
            assert torch.equal(first, depth)
        buckets, = model.buckets.values()
        for N, columns in [(bucket(n, 256), bucket(c, 64) + 1) for n in range(1, 256) for c in range(1, 65) if c <= n <= 4 * c]:
            buckets.step(N, columns).replay()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ours, ours_depth = model._skip_captured(idx, Halting(rule, eps, schedule), 8, late)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    read = [x.float() if rule == "kl" else model.readout(x).float() for x in (out, ours)]
    assert torch.equal(depth, ours_depth) and torch.allclose(*read, atol=atol, rtol=atol)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["freeze", "skip"])
def test_a_schedule_is_kept(rule, mode):
    """Oracle: the schedule itself; one sequence ends early and one never halts before the last loop."""
    model, idx = make(), tokens(4)
    schedule = torch.randint(1, 7, idx.shape, generator=torch.Generator().manual_seed(0))
    schedule[0], schedule[1] = 1, 9
    logits, depth = model.forward_halting(idx, rule, max_loops=6, mode=mode, schedule=schedule)
    assert torch.equal(depth, schedule.clamp_max(6))
    assert torch.allclose(logits, model.forward_halting(idx, rule, max_loops=6, mode="freeze", schedule=schedule)[0], atol=1e-4)


def test_padded_rows_of_the_vocabulary_do_not_exist():
    """Oracle: the same model with other values in the rows that pad the vocabulary to a multiple of 64."""
    model, idx = make(), tokens()
    before = model(idx)[0], model(idx, idx)[1], *model.forward_halting(idx, "kl", 1e-3, 8)
    assert before[0].shape[-1] == TINY["vocab_size"] < len(model.wte.weight)
    with torch.no_grad():
        model.wte.weight[TINY["vocab_size"]:] = 100.0
    after = model(idx)[0], model(idx, idx)[1], *model.forward_halting(idx, "kl", 1e-3, 8)
    assert all(torch.equal(a, b) for a, b in zip(before, after))


def test_training_draws_fresh_states_and_evaluation_does_not():
    """Oracle: two passes over the same tokens."""
    model, idx = make(), tokens()
    assert torch.equal(model(idx, n_loops=1)[0], model(idx, n_loops=1)[0])
    model.train()
    assert not torch.equal(model(idx, n_loops=1)[0], model(idx, n_loops=1)[0])


def test_flops_equal_those_of_the_dense_products():
    """Oracle: torch.utils.flop_counter."""
    from torch.utils.flop_counter import FlopCounterMode
    for injection in ("linear", "add"):
        model, idx = make(injection=injection), tokens(2, 20)
        prelude, loop, readout = model.flops_per_token(20)
        with FlopCounterMode(display=False) as counter:
            model(idx, n_loops=3)
        assert counter.get_total_flops() == idx.numel() * (prelude + 3 * loop + readout)


@pytest.mark.parametrize("change", [dict(n_head=3), dict(n_kv_head=3), dict(n_core=0), dict(injection="mul"), dict(n_embd=0),
                                    dict(state_init="ones"), dict(mean_loops=2.5), dict(vocab_size=-1)])
def test_a_wrong_configuration_is_refused_by_name(change):
    """Oracle: the message names the field."""
    with pytest.raises(ValueError, match=next(iter(change))):
        LoopConfig(**{**TINY, **change})


@pytest.mark.parametrize("change", [dict(rule="entropy"), dict(mode="stop"), dict(eps=-1.0), dict(eps=math.nan), dict(max_loops=0)])
def test_a_wrong_halting_argument_is_refused_by_name(change):
    """Oracle: the message names the argument."""
    with pytest.raises(ValueError, match=next(iter(change))):
        make().forward_halting(tokens(), **change)


def test_too_long_a_sequence_is_refused():
    """Oracle: the message names both lengths."""
    with pytest.raises(ValueError, match="25 .*24"):
        make()(tokens(1, 25))


def test_kl_of_many_ids_is_computed_in_parts():
    """Oracle: row by row; more logits than one part holds."""
    g = torch.Generator().manual_seed(0)
    for V in (70000, 300000):
        a, b = torch.randn(2, 3, V, generator=g), torch.randn(2, 3, V, generator=g)
        parts = torch.stack([torch.stack([kl_signal(p, q) for p, q in zip(*rows)]) for rows in zip(a, b)])
        assert torch.allclose(kl_signal(a, b), parts, rtol=1e-6)
