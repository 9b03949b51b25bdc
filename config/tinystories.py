"""
TinyStories with GPT-2 BPE, training mean 4: the scale of the paper's controls (claims 7 and 9), 31.8M parameters.

The embedding holds 19.3M of them, 2 + 4 + 2 blocks of width 384 the rest. --sigma=0 trains the control at fixed depth 4.
"""
data = "data/tinystories"
out = "out/tinystories"

# the model
block_size = 512
n_embd = 384
n_head = 6
n_kv_head = 2
n_hidden = 984
n_prelude = 2
n_core = 4
n_coda = 2
injection = "linear"
state_init = "normal"

# the loop in training
mean_loops = 4
sigma = 0.5
max_loops = 16
backprop_loops = 4

# 32 sequences * 4 passes * 512 tokens = 2**16 tokens a step; 7,500 steps are 0.49B tokens, about one epoch
batch_size = 32
grad_accum = 4
max_steps = 7500
learning_rate = 1e-3
warmup_steps = 300
schedule = "trapezoid"
decay_fraction = 0.2
eval_interval = 500
eval_tokens = 2**19
