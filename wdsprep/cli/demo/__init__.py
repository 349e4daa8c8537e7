"""The pictures and the steps of `wdsprep demo`."""
