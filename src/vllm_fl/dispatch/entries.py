from fl_dispatch.run.generated import *
