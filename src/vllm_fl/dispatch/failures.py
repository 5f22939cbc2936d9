from fl_dispatch.knowledge.failures import *
