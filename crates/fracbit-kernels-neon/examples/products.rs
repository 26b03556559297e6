//! Multiplies a packed matrix by a batch again and again: the program whose instructions `cargo
//! xtask count` counts.
//!
//! `products SCHEME TABLE GROUP BATCH TIMES`: TABLE is the place of the codebooks among those that
//! [`cases::tables`] has for the scheme, GROUP the columns of a weight scale (0: the whole row).
#![expect(clippy::print_stdout, reason = "an example")]

use fracbit_base::{Scheme, Shape};
use fracbit_kernels::{Activations, Kernels, PackedMatrix, cases, matmul};

const ROWS: usize = 512;
const COLS: usize = 4096;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize| args[i].parse::<usize>().expect("a number");
    let scheme: Scheme = args[0].parse().expect("the name of a scheme");
    let group = if number(2) == 0 { COLS } else { number(2) };
    let mut kernels = Kernels::scalar();
    fracbit_kernels_neon::install(&mut kernels).expect("FRACBIT_ISA names an instruction set");
    let books = cases::tables(scheme).swap_remove(number(1));
    let table = books[0].entries().len();
    let packed = cases::Packed::random(scheme, Shape::new(ROWS, COLS), books, group, 1);
    let w = PackedMatrix::new(&kernels, &packed.view().expect("parts that fit"));
    let batch = number(3);
    let (mut x, mut y) = (Activations::new(), vec![0.0; batch * ROWS]);
    x.set(&cases::activations(batch * COLS, 1), COLS).expect("whole rows");
    for _ in 0..number(4) {
        matmul(&w, &mut x, &mut y).expect("shapes that fit");
    }
    // The sum keeps the products alive; the macs are what the count is divided by.
    println!("{} {} {table} {}", w.isa(), batch * ROWS * COLS, y.iter().sum::<f32>());
}
