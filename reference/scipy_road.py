"""The deprecated name of scipy_losses. The next release removes it."""

import sys
import warnings

from . import scipy_losses

warnings.warn("pairproof.reference.scipy_road is now scipy_losses", DeprecationWarning, stacklevel=2)
sys.modules[__name__] = scipy_losses
