from fl_dispatch.run.plan import *
