//! The fracbit command line
fn main() {}
