//! Error and encoding speed of every trellis scheme: `cargo run --release -p fracbit-trellis
//! --example table -- [log2 weights] [scheme ...]`.
//!
//! `published` is the error table of Q-Palette's solver (its `hyb` code at one step for all rates).
//! Speed is of one thread.
#![expect(clippy::print_stdout, reason = "the output of a command")]

use fracbit_base::{Code, Family, Scheme};
use fracbit_codebook::{Rounder, published};
use fracbit_trellis::{Effort, Isa, TrellisRounder, builtin, train};
use std::time::Instant;

/// Tiles that are timed: one in fifteen takes two passes, so many that their share is right (the
/// portable microkernels have fewer).
const TIMED: usize = 96;

fn main() {
    let mut args = std::env::args().skip(1);
    let log: u32 = args.next().map_or(20, |text| text.parse().expect("log2 of the number of weights"));
    let named: Vec<Scheme> = args.map(|text| text.parse().expect("a tcq scheme")).collect();
    let tiles = train::gaussian_tiles(20_000, (1 << log) / 256);
    let timed = |isa| &tiles[..tiles.len().min(if isa == Isa::Scalar { 8 } else { TIMED })];
    let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("one thread");
    println!(
        "scheme        entries    nmse       published   / pub.   bound      excess bits  effort, more error, kweights/s per core"
    );
    for scheme in Scheme::all().filter(|s| matches!(s.family(), Family::Tcq(_))) {
        if !(named.is_empty() || named.contains(&scheme)) {
            continue;
        }
        let book = builtin(scheme).expect("a codebook for every tcq scheme");
        let nmse = train::relative_error(book, &tiles);
        // Quarters of a bit are not in the papers.
        let published = published(scheme).unwrap_or(f64::NAN);
        let bound = scheme.rate().gaussian_bound();
        let isas: Vec<Isa> = Isa::ALL.into_iter().filter(|isa| isa.is_supported()).collect();
        let all: Vec<_> =
            Effort::ALL.into_iter().flat_map(|e| isas.iter().map(move |&isa| (e, isa))).collect();
        let rounders: Vec<_> =
            all.iter().map(|&(e, isa)| TrellisRounder::with_isa(book.clone(), e, isa)).collect();
        let mut codes = vec![0; TIMED * book.tile_bytes()];
        let mut seconds = vec![f64::INFINITY; all.len()];
        // The best of several interleaved rounds, each run long enough for a coarse clock: other
        // load only slows a run down.
        for round in 0..7 {
            for ((rounder, (_, isa)), best) in rounders.iter().zip(&all).zip(&mut seconds) {
                if *isa == Isa::Scalar && round > 0 {
                    continue;
                }
                let once = alone.install(|| {
                    let (start, mut times) = (cpu_seconds(), 0.0);
                    loop {
                        rounder.encode(timed(*isa), &mut codes[..timed(*isa).len() * book.tile_bytes()]);
                        times += 1.0;
                        let seconds = cpu_seconds() - start;
                        if seconds > 0.1 || *isa == Isa::Scalar {
                            return seconds / times;
                        }
                    }
                });
                *best = best.min(once);
            }
        }
        let mut speeds = String::new();
        for effort in Effort::ALL {
            let rounder = TrellisRounder::new(book.clone(), effort);
            let more = train::error_of(&rounder, &tiles) / nmse - 1.0;
            speeds += &format!("  {effort} {:+.2} %", 100.0 * more);
            for ((_, isa), seconds) in all.iter().zip(&seconds).filter(|((e, _), _)| *e == effort) {
                #[expect(clippy::cast_precision_loss, reason = "a speed")]
                let speed = (timed(*isa).len() * 256) as f64 / seconds / 1e3;
                speeds += &format!(" {} {speed:.0}", isa.name());
            }
        }
        let name = format!("{scheme}{}", if scheme.code() == Some(Code::Fine) { " (fine)" } else { "" });
        println!(
            "{name:14} {:6}   {nmse:.7}  {published:.7}  {:.4}  {bound:.7}  {:.4}      {speeds}",
            book.entries().len(),
            nmse / published,
            (nmse / bound).log2() / 2.0,
        );
    }
}

/// Processor time of this thread where Linux tells it, wall time elsewhere.
fn cpu_seconds() -> f64 {
    thread_local!(static START: Instant = Instant::now());
    let told = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let nanoseconds = told.and_then(|text| text.split_whitespace().next()?.parse::<f64>().ok());
    nanoseconds.map_or_else(|| START.with(|start| start.elapsed().as_secs_f64()), |ns| ns / 1e9)
}
