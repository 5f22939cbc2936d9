from fl_dispatch.hosting.aten_operators import *
