"""Setup of all tests: Triton kernels run under its interpreter, on CPU tensors.

The choice is made when Triton and the kernels are imported, whichever test does it first.
"""

import os

from hypothesis import settings

from gllm.kernels.native.builds import BUILD_VARIABLE, OFF, select_build
from tests.examples import LONG_PROFILE

os.environ["TRITON_INTERPRET"] = "1"
# A named build computes everything, so that no test hangs on a short measurement.
if BUILD_VARIABLE not in os.environ and select_build().name != OFF:
    os.environ[BUILD_VARIABLE] = select_build().name

settings.register_profile(LONG_PROFILE)
