"""What holds for all tests: Triton kernels run under its interpreter, on CPU tensors.

The choice is made when Triton and the kernels are imported, whichever test does it first.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
