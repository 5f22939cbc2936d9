from fl_dispatch.private_file import *
