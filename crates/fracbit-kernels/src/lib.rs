//! Kernel families of fracbit: checked arguments, scalar reference, parity cases and the dispatch table
