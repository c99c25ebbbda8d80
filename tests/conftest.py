"""Setup of all tests: Triton kernels run under its interpreter, on CPU tensors.

The choice is made when Triton and the kernels are imported, whichever test does it first.
"""

import os

from hypothesis import settings

from gllm.kernels.native.builds import OFF, VARIABLE, select
from tests.examples import LONG_PROFILE

os.environ["TRITON_INTERPRET"] = "1"
# A named build computes everything, so that no test hangs on a short measurement.
if VARIABLE not in os.environ and select().name != OFF:
    os.environ[VARIABLE] = select().name

settings.register_profile(LONG_PROFILE)
