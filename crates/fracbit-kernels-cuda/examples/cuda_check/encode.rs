//! The encoder on a GPU: its bytes and its speed.

use fracbit_base::{Family, Scheme};
use fracbit_codebook::Rounder as _;
use fracbit_kernels_cuda::{Gpu, TrellisEncoder};
use fracbit_trellis::{Effort, rounder, train::gaussian_tiles};
use std::{error::Error, time::Instant};

/// Compares the codes of every trellis scheme with the processor's, and times the search.
pub(crate) fn run(gpu: &Gpu) -> Result<(), Box<dyn Error>> {
    let mut schemes = 0;
    for scheme in Scheme::all().filter(|s| matches!(s.family(), Family::Tcq(_))) {
        let exact = || rounder(scheme, Effort::Exact).ok_or("a trellis scheme");
        let tiles = gaussian_tiles(7, 3);
        let mut want = vec![0; tiles.len() * exact()?.codebook().tile_bytes()];
        exact()?.encode(&tiles, &mut want);
        let got = match TrellisEncoder::new(gpu, exact()?) {
            Ok(encoder) => encoder.encode_tiles(&tiles)?,
            Err(e) => {
                println!("{scheme}: {e}");
                continue;
            }
        };
        assert_eq!(got, want, "{scheme}: codes on the GPU and on the processor");
        schemes += 1;
    }
    println!("encoder: bytes of the processor for {schemes} schemes");
    let tiles = gaussian_tiles(7, 1 << 14);
    for name in ["tcq-2", "tcq-fast-2", "tcq-hyb-2", "tcq-3", "tcq-4", "tcq-1.5"] {
        let encoder = TrellisEncoder::new(gpu, rounder(name.parse()?, Effort::Exact).ok_or("trellis")?)?;
        encoder.encode_tiles(&tiles)?;
        let start = Instant::now();
        encoder.encode_tiles(&tiles)?;
        let weights = 256.0 * tiles.len() as f64;
        println!("{name}: {:.1} Mweights/s", weights / start.elapsed().as_secs_f64() / 1e6);
    }
    Ok(())
}
