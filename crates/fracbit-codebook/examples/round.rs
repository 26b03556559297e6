//! Error and single-thread encoding speed of every scalar and vector codebook: `cargo run --release
//! --example round`.
#![expect(clippy::print_stdout, reason = "a command-line program")]

use fracbit_base::Scheme;
use fracbit_codebook::{distortion, laws, published, rounder};
use fracbit_format::TILE;
use std::time::Instant;

fn main() {
    println!("{:8} {:>11} {:>11} {:>12}", "scheme", "NMSE", "published", "Mweights/s");
    let tiles = laws::tiles(4096, 1);
    for scheme in Scheme::all() {
        let (Some(rounder), Some(published)) = (rounder(scheme), published(scheme)) else { continue };
        let mut codes = vec![0; tiles.len() * rounder.codebook().tile_bytes()];
        rounder.encode(&tiles, &mut codes);
        let start = Instant::now();
        rounder.encode(&tiles, &mut codes);
        let speed = (tiles.len() * TILE) as f64 / start.elapsed().as_secs_f64() / 1e6;
        let error = distortion(rounder.as_ref(), 1 << 20, 1);
        println!("{:8} {error:11.4e} {published:11.4e} {speed:12.0}", scheme.to_string());
    }
}
