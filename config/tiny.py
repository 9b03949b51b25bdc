"""
Bytes of Python's standard library on a CPU: a looped model in minutes, deep enough to watch it converge.

1 + 1 * 8 + 1 = 10 unrolled blocks of 0.80M weights and 8 adapters of 0.13M: 9.1M weights at work on each byte, from 2.6M
parameters. 1,400 steps of 8 * 256 bytes are 2.9M bytes, a quarter of an epoch.
"""
data = "data/stdlib"
out = "out/tiny"

# the model
block_size = 256
n_embd = 256
n_head = 4
n_kv_head = 4
n_hidden = 704
n_prelude = 1
n_core = 1
n_coda = 1
injection = "add"
state_init = "normal"

# the loop in training
mean_loops = 8
sigma = 0.5
max_loops = 32
backprop_loops = 8

# small batches: with so few tokens, more steps help more than calmer ones
batch_size = 8
grad_accum = 1
max_steps = 1400
learning_rate = 2e-3
warmup_steps = 40
schedule = "trapezoid"
decay_fraction = 0.4
eval_interval = 350
eval_tokens = 65536
log_interval = 10
