from fl_dispatch.knowledge.counting import *
