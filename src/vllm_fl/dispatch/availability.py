from fl_dispatch.knowledge.availability import *
