"""
Settings: a script's block of defaults, then a configuration file, then --key=value on top.

    settings = config.parse(Settings, __doc__)      # Settings: a dataclass of plain typed defaults

A configuration file is data, not a program: assignments of literals and simple arithmetic to known names.
"""

import ast
import dataclasses
import difflib
import inspect
import math
import operator
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import zipfile

import torch
from tqdm import tqdm

from model import load_checkpoint


def fail(message):
    """End the script over a mistake that the user can mend: one line, exit code 2."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def run(main):
    """
    A script's main(). What is nobody's bug ends it without a traceback: Ctrl-C, a reader that has gone (`| head`), a disk, an
    output or a memory that is full. Where the output has no letter for a character, it gets a question mark.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:                     # closed by whoever started this
            setattr(sys, name, open(os.devnull, "w"))
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="replace")
    code, said = 1, None
    try:
        main()
        sys.stdout.flush()
        return
    except KeyboardInterrupt:
        code, said = 130, "interrupted"
    except BrokenPipeError:
        pass
    except OSError as error:
        said = f"error: {reason(error)}{f' ({error.filename})' if error.filename else ', with the output'}: make room, or write elsewhere"
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and "can't allocate memory" not in str(error):
            raise
        said = "error: not enough memory: use a smaller batch, fewer slots, or a smaller model"
    try:
        if said:
            print(said, file=sys.stderr, flush=True)
        sys.stdout.flush()
    except OSError:                                        # nothing is left to flush to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def reason(error):
    """What went wrong at the root, in one line."""
    while error.__cause__:
        error = error.__cause__
    return getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[0]


def parse(Settings, doc, argv=None):
    """
    -> an instance of the dataclass Settings, filled from its defaults, the configuration files named in argv
    (default: the command line) and its --key=value, in this order. Ends the script with one line and exit code 2
    on an unknown key, a wrong type or a file that is not a configuration; with 0 on --help.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(doc.strip() + "\n\nsettings, with their defaults:\n\n" + help_text(Settings))
        raise SystemExit(0)
    values = {f.name: f.default for f in dataclasses.fields(Settings)}
    argv = join_values(Settings, argv)
    for arg in argv:
        if not arg.startswith("--"):
            if not arg.endswith(".py"):
                fail(f"{arg!r} is neither a configuration file (*.py) nor --key=value")
            for key, value in read_file(arg, values).items():
                values[key] = check(Settings, key, value, arg)
    for arg in argv:
        if arg.startswith("--"):
            key, equals, text = arg[2:].partition("=")
            known(Settings, key, "the command line")
            if not equals and arg not in switches(Settings):
                fail(f"--{key} needs a value: --{key}=...")
            values[key] = check(Settings, key, literal(text) if equals else True, "the command line", text)
    try:
        return Settings(**values)
    except ValueError as error:
        fail(str(error))


def switches(Settings):
    return {f"--{f.name}" for f in dataclasses.fields(Settings) if f.type is bool}


def join_values(Settings, argv):
    """["--key", "value"] -> ["--key=value"]; a bool stands alone."""
    argv = list(argv)
    for i in range(len(argv) - 2, -1, -1):
        if re.fullmatch(r"--\w+", argv[i]) and argv[i] not in {"--help", *switches(Settings)} and not argv[i + 1].startswith("--"):
            argv[i:i + 2] = [f"{argv[i]}={argv[i + 1]}"]
    return argv


def help_text(Settings):
    """One `--key=default  meaning` line per field, read from the comments of the defaults themselves."""
    lines = []
    for cls in [c for c in reversed(Settings.__mro__) if dataclasses.is_dataclass(c)]:
        for line in inspect.getsource(cls).splitlines():
            field = re.match(r"    (\w+): \w+ = (.+?)\s*# (.*)", line)
            if field:
                lines.append(f"  --{field[1]}={field[2]}".ljust(34) + field[3])
            elif re.match(r"    # ", line):
                lines += [""] * bool(lines and lines[-1].startswith("  --")) + [line.strip("# ")]
    return "\n".join(lines)


def known(Settings, key, where):
    names = [f.name for f in dataclasses.fields(Settings)]
    if key not in names:
        near = difflib.get_close_matches(key, names, 1, 0)
        fail(f"unknown key {key!r} in {where}; the nearest is {near[0]!r} (--help lists all)")


def check(Settings, key, value, where, text=None):
    """value as the field's type, or one line that says what was wanted. `text`: as typed, for str fields."""
    known(Settings, key, where)
    want = next(f.type for f in dataclasses.fields(Settings) if f.name == key)
    if want is str and text is not None:
        return text
    if want is float and type(value) is int:
        return float(value) if abs(value) < 2**1000 else math.inf
    if want is int and type(value) is int and abs(value) >= 2**63:
        fail(f"{key} in {where} is beyond 2**63, which nothing here can count")
    if type(value) is not want:
        example = {int: "a whole number", float: "a number", bool: "True or False", str: "text in quotes"}[want]
        fail(f"{key} in {where} must be {example}, not {text if text is not None else value!r}")
    return value


def literal(text):
    """'3' -> 3, '2**18' -> 262144, 'abc' -> 'abc'."""
    try:
        return evaluate(ast.parse(text.strip()[:10_000], mode="eval").body, {})
    except (ValueError, SyntaxError, TypeError, ArithmeticError, RecursionError, MemoryError):
        return text


def read_file(path, names):
    """The assignments of a configuration file -> dict. Its right-hand sides may use keys assigned or known before."""
    check_file(path)
    try:
        with open(path, encoding="utf-8") as f:
            tree = ast.parse(f.read())
    except OSError as error:
        fail(f"cannot read the configuration file {path}: {error.strerror}")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        fail(f"{path} is not a configuration file: {reason(error)}")
    values = {}
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue                                                           # a docstring
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            fail(f"{path}, line {node.lineno}: only assignments like  key = value  are allowed")
        try:
            values[node.targets[0].id] = evaluate(node.value, {**names, **values})
        except (ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
            fail(f"{path}, line {node.lineno}: {error}")
    return values


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
             ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.USub: operator.neg}


def bounded(value):
    if isinstance(value, int) and value.bit_length() > 1024:
        raise ValueError("a number beyond 2**1024")
    return value


def evaluate(node, names):
    """A literal, a known name, or + - * / // ** of these; anything else, and a number beyond 2**1024, raises ValueError."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float, str, bool)):
        return bounded(node.value)
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.operand, names))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        a, b = evaluate(node.left, names), evaluate(node.right, names)
        if isinstance(a, str) or isinstance(b, str) or isinstance(node.op, ast.Pow) and abs(b) > 64:
            raise ValueError("only arithmetic on plain numbers is allowed")
        return bounded(OPERATORS[type(node.op)](a, b))
    raise ValueError(f"{ast.unparse(node)!r} is not a literal or simple arithmetic on known names")


# ---------------------------------------------------------------------------------------------------------
# what the scripts share around a model: where it runs, and files that are whole or not there

def pick_device(name):
    """"" -> the best device that is there; else the named one, checked."""
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        if not re.fullmatch(r"cpu|mps|cuda(:\d+)?|", name):
            raise RuntimeError
        torch.empty(1, device=name or best)
        if name.startswith("cuda:"):
            torch.cuda.set_device(name)                    # streams and graphs go to the current device
    except (RuntimeError, AssertionError, NotImplementedError):
        fail(f"there is no device {name!r} here; leave --device away to use {best!r}")
    return name or best


def pick_dtype(name, device):
    """"" -> bfloat16 where the processor multiplies it in hardware, else float32; a name -> that, checked."""
    cpu = torch.cpu.get_capabilities()
    has_bf16 = device.startswith("cuda") and torch.cuda.is_bf16_supported(including_emulation=False) \
        or device == "cpu" and bool(cpu.get("amx_bf16") or cpu.get("avx512_bf16"))
    if name == "bfloat16" and not has_bf16 and device != "cpu":
        fail(f"dtype bfloat16 is not there on {device}; use --dtype=float32")
    if name not in ("", "bfloat16", "float32"):
        fail(f"dtype must be bfloat16 or float32, not {name!r}")
    return getattr(torch, name or ("bfloat16" if has_bf16 else "float32"))


def check_floor(rule, eps, dtype):
    """End the script if this threshold lies below what rounding alone changes."""
    if rule == "kl" and dtype == torch.bfloat16 and eps < 1e-3:
        fail(f"in bfloat16 two readouts of one state differ by a KL near 1e-3, eps={eps:g} is below that: use --dtype=float32 or a larger --eps")


def check_file(path):
    """End the script if this is there and no file: a folder cannot be read, a pipe or device might never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        fail(f"{path} is not a file")


def check_bytes(path):
    """Raises if the bytes of a checkpoint, which is a zip file, do not have the checksums that were written with them."""
    with zipfile.ZipFile(path) as file:
        damaged = file.testzip()
    if damaged:
        raise ValueError(f"{damaged} is damaged")


def load_model(path, device="cpu"):
    """-> a checkpoint's model (float32, evaluation mode) and the checkpoint; or one line and exit code 2."""
    check_file(path)
    try:
        check_bytes(path)
        model, ckpt = load_checkpoint(path, device)
        for value, kind in ((ckpt["settings"]["data"], str), (ckpt["data"]["tokenizer"], str), (ckpt["step"], int)):
            if type(value) is not kind:
                raise TypeError(f"{value!r} should be of type {kind.__name__}")
    except FileNotFoundError:
        fail(f"no checkpoint at {path}: python train.py writes one, --ckpt= says where")
    except Exception as error:                             # torch's, pickle's, zip's: a garbled file can raise anything
        fail(f"{path} is not a whole checkpoint of train.py ({type(error).__name__}: {reason(error).split('. ')[0]})")
    for name, weight in model.state_dict().items():
        if not weight.isfinite().all():
            fail(f"{path} is of no use: {name} holds weights that are not finite; train again, with a lower --learning_rate")
    return model, ckpt


def interleaved(functions, repeats, clock=time.perf_counter):
    """{name: function} -> {name: [seconds, one for each round]}, measured A B A B ... after one round that warms up."""
    seconds = {name: [] for name in functions}
    for round in tqdm(range(repeats + 1), desc="time", disable=None):
        for name, function in functions.items():
            start = clock()
            function()
            if round:
                seconds[name].append(clock() - start)
    return seconds


def speedup(slow, fast):
    """The median, over the rounds of `interleaved`, of seconds over seconds in the same round: the machine's drift cancels."""
    return statistics.median(a / b for a, b in zip(slow, fast))


def write_whole(path, write):
    """Call write(temporary path), then rename: whoever reads `path` finds the old file or the new one, whole."""
    part = f"{path}.{os.getpid()}.part"
    try:
        write(part)
        with open(part, "rb") as f:
            os.fsync(f.fileno())
        os.replace(part, path)
    finally:
        if os.path.exists(part):
            os.remove(part)


def check_writable(*paths):
    """End the script now rather than after the work, if these files could not be written."""
    for path in map(str, paths):
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            fail(f"cannot write {path}: {folder} is not a folder")
        if os.path.lexists(path) and not os.path.isfile(path) or not os.access(folder, os.W_OK):
            fail(f"cannot write {path}: it is something else than a file, or its folder is closed to you")


def provenance(device):
    """What an artefact says of its making: commit, versions, processor."""
    try:
        commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True,
                                cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__)))).stdout.strip()
    except OSError:                                        # no git here
        commit = ""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else torch.cpu.get_capabilities().get("cpu_name", "")
    return {"commit": commit or "unknown", "torch": str(torch.__version__), "python": platform.python_version(),
            "device": device, "processor": name or platform.processor(), "threads": torch.get_num_threads()}
