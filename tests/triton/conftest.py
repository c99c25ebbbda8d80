"""Triton kernels under its interpreter: on CPU tensors, in this process.

The choice is made when a kernel is defined, so it comes before all imports of gllm.kernels.triton.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
