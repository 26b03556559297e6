//! Makes the committed codebooks and the scalar and vector lines of the error table.
//!
//! ```text
//! cargo run --release -p fracbit-codebook --example train_codebooks                # all, written to data/
//! cargo run --release -p fracbit-codebook --example train_codebooks -- nuq-4 vq-2  # these, printed
//! ```
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a command-line program")]

use fracbit_base::{Family, Scheme};
use fracbit_codebook::{
    AdditiveRounder, GroupCoder, NestedRounder, ProgressiveCoder, VectorRounder, distortion,
    group_distortion, progressive_distortion, published, train,
};
use fracbit_format::Codebook;
use std::{error::Error, fs, path::Path, time::Instant};

/// Seed and size of the held-out sample that errors of vector codebooks are measured on; additive
/// ones take an eighth of it.
const HELD_OUT: (u64, usize) = (0x7e57, 1 << 25);

fn main() -> Result<(), Box<dyn Error>> {
    let wanted = std::env::args().skip(1).map(|name| name.parse()).collect::<Result<Vec<Scheme>, _>>()?;
    if !wanted.is_empty() {
        for scheme in wanted {
            println!("{}", make(scheme)?.0);
        }
        return Ok(());
    }
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
    let mut errors = Vec::new();
    for (family, file) in [
        ("nuq", "nuq.txt"),
        ("vq", "vq.txt"),
        ("gnuq", "gnuq.txt"),
        ("int", ""),
        ("qoq", ""),
        ("aq", "aq.txt"),
        ("nest-nuq", "nest-nuq.txt"),
    ] {
        let mut text = String::new();
        for scheme in Scheme::all().filter(|s| s.family().name() == family) {
            let (book, error) = make(scheme)?;
            text += &format!("{book}\n");
            errors.push(format!("{scheme} {error:.6e}\n"));
        }
        if !file.is_empty() {
            fs::write(data.join(file), text)?; // plain integers need no file
        }
    }
    // Lines of other families are somebody else's and stay.
    let table = data.join("nmse.txt");
    let others = fs::read_to_string(&table)?;
    let own = ["nuq-", "vq-", "gnuq-", "int-", "qoq-", "aq-", "nest-nuq-"];
    let others = others.lines().filter(|l| !own.iter().any(|name| l.starts_with(name)));
    errors.extend(others.map(|line| format!("{line}\n")));
    fs::write(table, errors.concat())?;
    Ok(())
}

/// Trains one codebook and finds its error.
fn make(scheme: Scheme) -> Result<(Codebook, f64), Box<dyn Error>> {
    let start = Instant::now();
    let book =
        train::codebook(scheme, train::SEED).ok_or("train: scheme should be of another family than tcq")?;
    let seconds = start.elapsed().as_secs_f64();
    let error = if scheme.family() == Family::Nuq {
        let weights: Vec<f64> =
            book.entries().iter().map(|&e| f64::from(f32::from(e) * book.step())).collect();
        train::scalar_error(&weights)
    } else if let Some(coder) = ProgressiveCoder::new(scheme) {
        progressive_distortion(coder, 1 << 22, HELD_OUT.0)
    } else if scheme.group().is_some() {
        group_distortion(&GroupCoder::new(book.clone()).ok_or("a group-wise codebook")?, 1 << 22, HELD_OUT.0)
    } else if matches!(scheme.family(), Family::Additive(_)) {
        distortion(&AdditiveRounder::new(book.clone())?, HELD_OUT.1 / 8, HELD_OUT.0)
    } else if matches!(scheme.family(), Family::NestNuq(_)) {
        distortion(&NestedRounder::new(book.clone())?, HELD_OUT.1, HELD_OUT.0)
    } else {
        distortion(&VectorRounder::new(book.clone())?, HELD_OUT.1, HELD_OUT.0)
    };
    let published = published(scheme).unwrap_or(f64::NAN);
    let change = 100.0 * (error / published - 1.0);
    eprintln!(
        "{scheme:8} {:?} nmse {error:.6e} published {published:.6e} ({change:+.2} %) {seconds:.1} s",
        book.grid()
    );
    Ok((book, error))
}
