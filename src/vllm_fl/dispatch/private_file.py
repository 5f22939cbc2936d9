from fl_dispatch.hosting.private_file import *
