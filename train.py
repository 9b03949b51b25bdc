"""
Train a looped language model: one draw of r per optimizer step, cross-entropy alone.

    python train.py config/tiny.py                                        # a CPU, minutes
    python train.py config/loop135m.py                                    # one GPU
    torchrun --standalone --nproc_per_node=8 train.py config/loop135m.py  # several
    python train.py config/tiny.py --init_from=resume                     # go on after a stop

Any setting can be changed on the command line, --key=value. Batches, the initial states' noise and r are pure
functions of (seed, step, rank), so a resumed run is the run that was interrupted, to the last bit.
"""

import bisect
import glob
import math
import os
import random
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from statistics import NormalDist

import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

import config
from model import LoopConfig, LoopLM
from prepare_data import Corpus


@dataclass
class Settings(LoopConfig):
    # the loop in training
    max_loops: int = 32          # r = clip(round(LogNormal(mu, sigma)), 1, max_loops), one draw per step
    sigma: float = 0.5           # mu is set so that the mean of r is mean_loops; sigma=0 trains at fixed depth
    # data and output
    data: str = "data/fineweb-edu"  # folder of shards, written by prepare_data.py
    out: str = "out"             # folder for ckpt.pt and log.txt
    init_from: str = "scratch"   # "scratch", or "resume" to go on from the checkpoint in `out`
    # optimisation
    max_steps: int = 49210       # optimizer steps
    batch_size: int = 16         # sequences in one forward pass
    grad_accum: int = 16         # forward passes in one step, shared among the ranks
    learning_rate: float = 1e-3  # the peak
    min_lr: float = 0.0          # the end of the decay
    warmup_steps: int = 1000     # linear from 0
    schedule: str = "trapezoid"  # "trapezoid": constant, then linear decay; or "cosine"
    decay_fraction: float = 0.2  # last share of the steps that the trapezoid decays over
    optimizer: str = "muon"      # "muon" for the matrices of adapter and blocks, AdamW for the rest; or "adamw" for all
    muon_factor: float = 1.0     # Muon's learning rate is learning_rate times this; its updates are as large as AdamW's
    beta1: float = 0.9           # AdamW
    beta2: float = 0.95          # AdamW
    weight_decay: float = 0.1    # on matrices only
    grad_clip: float = 1.0       # largest gradient norm; 0: no limit
    # evaluation and logging
    eval_interval: int = 1000    # steps between validations; a checkpoint is written before each
    eval_tokens: int = 131072    # the first tokens of the validation split
    log_interval: int = 1        # steps between log lines
    # system
    device: str = ""             # "cuda", "cuda:1", "mps" or "cpu"; empty: the best that is there
    dtype: str = ""              # "bfloat16" (autocast) or "float32"; empty: bfloat16 where the processor has it
    compile: bool = True         # torch.compile of prelude, loop step and coda; r never recompiles
    peak_tflops: float = 0.0     # of the device in this dtype, for MFU; 0: known for some GPUs, else n/a
    seed: int = 1337             # of the weights, the batches, the noise and r

    def __post_init__(self):
        super().__post_init__()
        at_least_1 = ("max_loops", "max_steps", "batch_size", "grad_accum", "eval_interval", "eval_tokens", "log_interval")
        for f in fields(Settings):
            value, least = getattr(self, f.name), 1 if f.name in at_least_1 else 0
            if f.type in (int, float) and not (value >= least and math.isfinite(value)):
                raise ValueError(f"{f.name} must be a finite number of at least {least}, not {value}")
        if self.sigma == 0 and self.mean_loops > self.max_loops or self.sigma and not 1 < self.mean_loops < self.max_loops:
            raise ValueError(f"mean_loops={self.mean_loops} must lie between 1 and max_loops={self.max_loops}, or sigma be 0")
        if self.backprop_loops > self.max_loops:
            raise ValueError(f"backprop_loops={self.backprop_loops} exceeds max_loops={self.max_loops}")
        for name, most in (("sigma", 2), ("decay_fraction", 1), ("beta1", 0.9999), ("beta2", 0.99999), ("max_loops", 10_000),
                           ("batch_size", 2**20), ("grad_accum", 2**20)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most}, not {getattr(self, name)}")
        if self.schedule not in ("trapezoid", "cosine"):
            raise ValueError(f"schedule must be 'trapezoid' or 'cosine', not {self.schedule!r}")
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"optimizer must be 'adamw' or 'muon', not {self.optimizer!r}")
        if self.init_from not in ("scratch", "resume"):
            raise ValueError(f"init_from must be 'scratch' or 'resume', not {self.init_from!r}")
        if not (self.data and self.out):
            raise ValueError("data and out must name folders")


# Dense bf16 peaks with float32 accumulation, in TFLOP/s, from the vendor's data sheets.
PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "RTX 4090": 165, "RTX 3090": 71}
EVAL_DEPTHS = (1, 2, 3, 4, 8)    # and the training mean
SAME_RUN = ("max_loops", "sigma", "batch_size", "grad_accum", "seed", "optimizer")          # a resumed run cannot change these


def loop_distribution(mean_loops, sigma, max_loops):
    """
    Cumulative probabilities P(r <= 1), .., P(r <= max_loops) of r = clip(round(LogNormal(mu, sigma)), 1, max_loops),
    with mu found by bisection so that the mean of r, after rounding and clipping, is mean_loops.
    """
    def cumulative(mu):
        return [NormalDist(mu, sigma).cdf(math.log(k + 0.5)) for k in range(1, max_loops)] + [1.0]

    if sigma == 0:
        return [float(k >= mean_loops) for k in range(1, max_loops + 1)]
    low, high = -10.0, 10.0 + math.log(max_loops)
    for _ in range(100):
        mu = (low + high) / 2
        mean = max_loops - sum(cumulative(mu)[:-1])        # E[r] = sum over k >= 0 of P(r > k)
        low, high = (mu, high) if mean < mean_loops else (low, mu)
    return cumulative(mu)


def draw_loops(cumulative, seed, step):
    """The r of a step, the same on every rank and after a resume."""
    return 1 + bisect.bisect_left(cumulative, random.Random(f"loops {seed} {step}").random())


def learning_rate(step, s):
    if step < s.warmup_steps:
        return s.learning_rate * (step + 1) / s.warmup_steps
    if s.schedule == "cosine":
        progress = (step - s.warmup_steps) / max(1, s.max_steps - s.warmup_steps)
        return s.min_lr + (s.learning_rate - s.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    left = (s.max_steps - step) / max(1, round(s.decay_fraction * s.max_steps))
    return s.min_lr + (s.learning_rate - s.min_lr) * max(0.0, min(1.0, left))


def orthogonalize(m, steps=5):
    """
    m = u s v^T -> about u v^T: all but the smallest singular values are brought near 1 by a polynomial of m m^T that needs matrix products only
    (Newton-Schulz; the coefficients are those of Muon, steep at 0 rather than exact at 1: 0.7 to 1.2).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m.T if m.shape[0] > m.shape[1] else m
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if m.shape[0] > m.shape[1] else x


class Muon(torch.optim.Optimizer):
    """
    Momentum whose step is made orthogonal (kellerjordan.github.io/posts/muon), for matrices; its size, root mean square 0.2, is
    AdamW's. As torch.optim.Muon(adjust_lr_fn="match_rms_adamw"), which knows bfloat16 only: where a processor has no
    such products, a step of config/tiny.py would take 8 seconds.
    """

    def __init__(self, params, dtype, weight_decay, momentum=0.95):
        super().__init__(params, dict(lr=0.0, weight_decay=weight_decay, momentum=momentum))
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                mean = state["momentum"].lerp_(p.grad, 1 - momentum)
                update = orthogonalize(p.grad.lerp(mean, momentum).to(self.dtype))             # Nesterov's look ahead
                p.mul_(1 - lr * group["weight_decay"]).add_(update, alpha=-lr * 0.2 * max(p.shape) ** 0.5)


def make_optimizers(model, s, device, dtype):
    """[AdamW], or [AdamW, Muon]. Each group's learning rate is the schedule's times its "factor". dtype: see Muon."""
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not model.wte.weight]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": [model.wte.weight], "weight_decay": s.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if s.optimizer == "adamw":
        groups[0]["params"] += matrices
    optimizers = [torch.optim.AdamW(groups, betas=(s.beta1, s.beta2), fused=device.startswith(("cuda", "cpu")))]
    if s.optimizer == "muon":
        optimizers.append(Muon(matrices, dtype, s.weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["factor"] = s.muon_factor if isinstance(optimizer, Muon) else 1.0
    return optimizers


@torch.no_grad()
def loss_by_depth(model, windows, depths, batch_size, context):
    """Mean cross-entropy in nats at each depth over windows (x, y), from one pass: {depth: loss}."""
    model.eval()
    device, total = model.wte.weight.device, dict.fromkeys(sorted(depths), 0.0)
    for start in range(0, len(windows[0]), batch_size):
        x, y = (torch.from_numpy(w[start:start + batch_size]).long().to(device) for w in windows)
        with context:
            e = model.prelude(x)
            s = model.initial_state(e)
            for i in range(1, max(depths) + 1):
                s = model.loop_step(s, e)
                if i in total:
                    total[i] += model.loss(s, y, "sum").item()
    model.train()
    return {depth: nats / windows[1].size for depth, nats in total.items()}


def compile_parts(model, sample, context):
    """torch.compile what every step calls, and prove that it works here. -> "", or why it does not: then all stays eager."""
    names = ("prelude", "loop_step", "finish")
    for name in names:
        setattr(model, name, torch.compile(getattr(model, name), dynamic=False))
    try:
        with context:
            model(sample, sample, model.config.backprop_loops + 1)[1].backward()   # with gradient and without
        if not all(p.grad.isfinite().all() for p in model.parameters()):           # seen once: right eagerly, NaN compiled
            raise ArithmeticError("its gradients are not finite")
        return ""
    except Exception as error:                              # any of many: no compiler, no headers, unsupported GPU
        for name in names:
            delattr(model, name)
        return config.reason(error)
    finally:
        model.zero_grad(set_to_none=True)


def main(argv=None):
    s = config.parse(Settings, __doc__, argv)

    # Ctrl-C or SIGTERM asks to stop: all ranks finish the step at hand, then the checkpoint is written. The second insists.
    asked = []

    def ask(number, frame):
        asked.append(number)
        signal.signal(number, handlers[number])

    handlers = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}

    # where we are: torchrun tells each process its rank
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    master = rank == 0
    device = config.pick_device(s.device)
    if world > 1:
        if s.grad_accum % world:
            config.fail(f"grad_accum={s.grad_accum} must be a multiple of the {world} processes")
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    dtype = config.pick_dtype(s.dtype, device)
    context = torch.autocast(device.split(":")[0], dtype) if dtype == torch.bfloat16 else nullcontext()

    # data
    try:
        corpus = Corpus(s.data)
        windows = corpus.windows("val", s.eval_tokens, s.block_size)
        corpus.batch("train", s.seed, 0, 1, s.block_size)
    except (ValueError, OSError) as error:
        config.fail(str(error))
    if len(windows[0]) > s.batch_size:                      # whole batches only: another shape would be compiled anew
        windows = [w[:len(w) // s.batch_size * s.batch_size] for w in windows]
    if s.vocab_size not in (corpus.vocab_size, Settings.vocab_size):
        config.fail(f"vocab_size={s.vocab_size}, but the tokenizer of {s.data} has {corpus.vocab_size}: leave it away")
    s.vocab_size = corpus.vocab_size

    # model and optimizer, from scratch or from the checkpoint of an earlier run
    torch.manual_seed(s.seed)
    model_config = LoopConfig(**{f.name: getattr(s, f.name) for f in fields(LoopConfig)})
    try:
        model = LoopLM(model_config).to(device)
    except (RuntimeError, MemoryError, TypeError, OverflowError) as error:     # torch's words for too large
        config.fail(f"a model of this size cannot be made here ({config.reason(error)[:100]}): choose a smaller one")
    optimizers = make_optimizers(model, s, device, dtype)
    ckpt_path, step, losses = os.path.join(s.out, "ckpt.pt"), 0, {}
    lock = FileLock(os.path.join(s.out, ".lock"), is_singleton=True)
    if s.init_from == "resume":
        if not os.path.exists(ckpt_path):
            config.fail(f"nothing to resume: {ckpt_path} is not there; leave --init_from away to start from scratch")
        config.check_file(ckpt_path)
        try:
            config.check_bytes(ckpt_path)
            ckpt = torch.load(ckpt_path, map_location=device, weights_only=True)
            there, identity, losses = ckpt["config"], ckpt["data"], ckpt["val_loss_by_depth"]
            there |= {key: ckpt["settings"][key] for key in SAME_RUN}
            step = int(ckpt["step"])
        except Exception as error:                          # torch's, pickle's, zip's: a garbled file can raise anything
            config.fail(f"{ckpt_path} is not a whole checkpoint of train.py ({type(error).__name__}): remove it to start anew")
        for key, value in there.items():
            if getattr(s, key, value) != value:
                config.fail(f"{ckpt_path} was trained with {key}={value}, not {getattr(s, key)}")
        if identity != corpus.identity:
            config.fail(f"{ckpt_path} was trained on other data than {s.data} holds: name its own with --data=")
        model.load_state_dict(ckpt["model"])
        for optimizer, state in zip(optimizers, ckpt["optimizers"], strict=True):
            settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
            optimizer.load_state_dict(state)
            for group, now in zip(optimizer.param_groups, settings):           # decay, betas, factor: as asked for now
                group.update(now)
    elif master and os.path.exists(ckpt_path):
        config.fail(f"{ckpt_path} exists: --init_from=resume goes on from it, another --out= keeps it, or remove it")

    # say what will run
    def say(line):
        if master:
            for file in (sys.stdout, log_file):
                try:
                    print(line, file=file, flush=True)
                except BrokenPipeError:                     # whoever read this has gone
                    raise
                except OSError:                             # a full disk: no reason to end a training
                    pass

    if master:
        try:
            os.makedirs(s.out, exist_ok=True)
            lock.acquire(timeout=0)
            log_file = open(os.path.join(s.out, "log.txt"), "a", buffering=1)
        except Timeout:
            config.fail(f"another process is training into {s.out}: choose another --out=")
        except OSError as error:
            config.fail(f"cannot write to the folder {s.out}: {error.strerror}; choose another --out=")
        for part in glob.glob(os.path.join(glob.escape(s.out), "*.part")):     # of a run that was killed as it wrote
            os.remove(part)
    about = {**config.provenance(device), "dtype": str(dtype)[6:], "processes": world}
    tokens_per_step = s.grad_accum * s.batch_size * s.block_size
    say(" ".join(f"{k}={v}" for k, v in about.items()))
    say(" ".join(f"{f.name}={getattr(s, f.name)!r}" for f in fields(s)))
    say(f"data {corpus.name}: {corpus.tokens['train']:,} training tokens, {corpus.tokens['val']:,} for validation; "
        f"{sum(p.numel() for p in model.parameters()):,} parameters; {tokens_per_step:,} tokens a step; "
        f"{device}, {str(dtype)[6:]}")
    if s.compile:
        sample = torch.zeros(s.batch_size, s.block_size, dtype=torch.long, device=device)
        started = time.time()
        failure = compile_parts(model, sample, context)
        say(f"compile: not possible here ({failure[:100]}); running eagerly" if failure else f"compiled in {time.time() - started:.0f} s")

    prelude, loop, readout = model.flops_per_token(s.block_size)
    peak = 1e12 * (s.peak_tflops or next((p for name, p in PEAK_TFLOPS.items() if name in about["processor"]), 0)) * world
    cumulative = loop_distribution(s.mean_loops, s.sigma, s.max_loops)
    depths = {d for d in EVAL_DEPTHS if d <= s.max_loops} | {s.mean_loops}

    def save():
        """Write the checkpoint -> could it be written?"""
        state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers], "step": step,
                 "config": asdict(model_config), "settings": asdict(s), "data": corpus.identity,
                 "val_loss_by_depth": losses, "meta": about}
        try:
            config.write_whole(ckpt_path, lambda path: torch.save(state, path))
            return True
        except (OSError, RuntimeError) as error:
            say(f"warning: the checkpoint of step {step} could not be written to {s.out} ({config.reason(error)})")
            return False

    def evaluate():
        found = loss_by_depth(model, windows, depths, s.batch_size, context)
        say(f"step {step:>6}/{s.max_steps}  validation loss at depth  " + "  ".join(f"{d}: {loss:.4f}" for d, loss in found.items()))
        return {str(d): loss for d, loss in found.items()}

    if master and step == s.max_steps and not losses:       # stopped between its last step and the evaluation
        losses = evaluate()
        save()
    model.train()
    leave, saved = False, True
    micro_steps = s.grad_accum // world
    train_started, t0 = time.time(), time.time()
    first_step = step
    while step < s.max_steps and not leave:
        n_loops = draw_loops(cumulative, s.seed, step)
        lr = learning_rate(step, s)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = lr * group["factor"]
        torch.manual_seed(random.Random(f"noise {s.seed} {step} {rank}").getrandbits(63))   # for the initial states
        step_loss = torch.zeros((), device=device)
        for micro in range(micro_steps):
            first = (rank * micro_steps + micro) * s.batch_size
            x, y = corpus.batch("train", s.seed, step, s.grad_accum * s.batch_size, s.block_size, first, s.batch_size)
            x, y = (torch.from_numpy(a).to(device, non_blocking=True) for a in (x, y))
            with context:
                _, loss = model(x, y, n_loops)
            (loss / s.grad_accum).backward()
            step_loss += loss.detach() / s.grad_accum
        if world > 1:                                       # one all-reduce: all gradients, the loss, a wish to stop
            wish = torch.tensor([len(asked)], dtype=torch.float32, device=device)
            flat = torch.cat([p.grad.flatten() for p in model.parameters()] + [step_loss[None], wish])
            try:
                dist.all_reduce(flat)
            except RuntimeError as error:
                print(f"error: another process of this run is gone ({config.reason(error)}); the last checkpoint in {s.out} is whole: "
                      f"--init_from=resume goes on from it", file=sys.stderr, flush=True)
                os._exit(1)                                 # no more waiting for anybody
            for p, grad in zip(model.parameters(), flat[:-2].split([p.numel() for p in model.parameters()])):
                p.grad.copy_(grad.view_as(p))
            step_loss, leave = flat[-2], flat[-1].item() > 0
        else:
            leave = bool(asked)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip or math.inf)
        if not (math.isfinite(step_loss) and math.isfinite(norm)):
            say(f"stopped: the loss ({step_loss:.4g}) or its gradient ({norm:.4g}) is not finite at step {step + 1} (r={n_loops}); "
                f"nothing is written over the last checkpoint. Try a lower --learning_rate.")
            sys.exit(1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1

        seconds, t0 = time.time() - t0, time.time()
        if step % s.log_interval == 0 or step == s.max_steps:
            done = 3 * (prelude + readout) + loop * (3 * min(n_loops, s.backprop_loops) + max(0, n_loops - s.backprop_loops))
            mfu = f"{done * tokens_per_step / seconds / peak:4.0%}" if peak else " n/a"
            left = int((time.time() - train_started) / (step - first_step) * (s.max_steps - step))
            say(f"step {step:>6}/{s.max_steps}  loss {step_loss:7.4f}  r {n_loops:>2}  lr {lr:.2e}  norm {norm:6.3f}  "
                f"{seconds * 1000:6.0f} ms  {tokens_per_step / seconds:8.0f} tok/s  mfu {mfu}  "
                f"left {left // 3600}:{left // 60 % 60:02}:{left % 60:02}")
        if master and (step % s.eval_interval == 0 or step == s.max_steps or leave):
            losses = {}
            saved = save()                                  # before the evaluation, which might kill the run
            if not leave:
                losses = evaluate()
                saved = save()
            t0 = time.time()

    for number, handler in handlers.items():
        signal.signal(number, handler)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    say(f"steps: {step}\ntokens: {step * tokens_per_step}\nseconds: {time.time() - train_started:.0f}")
    for d, loss in losses.items():
        say(f"val_loss_depth_{d}: {loss:.4f}")
    if not saved:
        say(f"error: the last checkpoint could not be written to {s.out}: make room and resume from the one before")
        sys.exit(1)
    say(f"checkpoint: {ckpt_path}")
    if leave:
        say(f"interrupted: the same command with --init_from=resume goes on from step {step}")
        sys.exit(128 + (asked or [signal.SIGTERM])[0])
    return model


if __name__ == "__main__":
    config.run(main)
