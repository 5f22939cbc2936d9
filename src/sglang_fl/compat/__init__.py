"""SGLang's own choices and kernels beside our operators, and every difference between its versions."""
