"""The account of a load: the parameters that tensors filled, and the sentences that refuse the rest."""
