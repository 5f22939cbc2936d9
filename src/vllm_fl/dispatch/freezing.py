from fl_dispatch.compiled.freezing import *
