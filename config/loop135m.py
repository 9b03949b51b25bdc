"""
The 135M class of arXiv 2607.14427 on FineWeb-Edu: SmolLM2-135M's width, 2 + 4 + 2 unique blocks.

2 + 8 * 4 + 2 = 36 unrolled blocks and 8 adapters put 132.8M weights to work on each token (without the head), from
58.0M parameters. Cost, forward and backward: 1.1 GFLOP a token, averaged over r; 12.9B tokens are 1.4e19 FLOP.
An RTX 4090 (165 TFLOP/s dense bf16) would take about 60 hours at 40 % of its peak: an estimate, not a run.
"""
data = "data/fineweb-edu"
out = "out"

# the model
block_size = 1024
n_embd = 576
n_head = 9
n_kv_head = 3
n_hidden = 1536
n_prelude = 2
n_core = 4
n_coda = 2
injection = "linear"
state_init = "normal"

# the loop in training
mean_loops = 8
sigma = 0.5
max_loops = 32
backprop_loops = 8

# 16 sequences * 16 passes * 1024 tokens = 2**18 tokens a step; 49,210 steps are 12.9B tokens
batch_size = 16
grad_accum = 16
max_steps = 49210
learning_rate = 1e-3
warmup_steps = 1000
schedule = "trapezoid"
decay_fraction = 0.2
eval_interval = 500
eval_tokens = 2**20
