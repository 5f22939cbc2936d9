from fl_dispatch.run.arguments import *
