//! Exact rates, shapes, sizes and scheme names shared by the fracbit crates
