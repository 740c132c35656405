"""Names by which an instance tells the processes of its engine how to compute; vLLM's plugin reads them."""

EAGER = "STREAMRL_EAGER"
"""Environment variable that is 1 in an engine that compiles nothing."""
QUANTIZATION = "STREAMRL_QUANTIZATION"
"""Environment variable that is `FEW_ROWS` in an engine that uses this method, and the name of the loader (a key of
`weights/engine_codes.py` `LOAD_FORMATS`) in one that multiplies in 8 bits."""
NORMS = "streamrl_norms"
"""Name under which vLLM knows the norms of CPUs (`layer_ops_vllm.py`)."""
FEW_ROWS = "streamrl_few_rows"
"""Name under which vLLM knows the method for small batches (`few_rows_vllm.py`)."""
FEW_ROWS_SOURCES = {"float32": "few_rows.c", "bfloat16": "few_rows_bf16.c"}
"""C file of the products of small batches, beside this one, by `model.dtype`."""
