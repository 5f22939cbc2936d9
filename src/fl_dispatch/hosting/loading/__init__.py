"""The account of a load: which tensors filled which parameters, and the sentences that refuse the rest."""
