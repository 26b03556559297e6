//! Trains the committed codebooks, which takes about half an hour on two cores: `cargo run
//! --release -p fracbit-trellis --example train_trellis > crates/fracbit-trellis/data/trellis.txt`.
//! With arguments only the schemes named: `... --example train_trellis -- tcq-2 tcq-fast-4:128`,
//! where `:128` sets the table length; `--small` writes the golden file of the tests.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the output of a command")]

use fracbit_base::{Family, Scheme};
use fracbit_trellis::train::{self, Training};

fn main() {
    let names: Vec<String> = std::env::args().skip(1).collect();
    if names == ["--small"] {
        let training = Training { seed: 3, tiles: 8, rounds: 2 };
        println!("{}", train::train("tcq-fast-1".parse().expect("a scheme"), 64, &training));
        return;
    }
    let wanted: Vec<(Scheme, usize)> = if names.is_empty() {
        let schemes = Scheme::all().filter(|s| matches!(s.family(), Family::Tcq(_)));
        schemes.map(|scheme| (scheme, train::table_len(scheme))).collect()
    } else {
        let parse = |name: &String| {
            let (scheme, len) = name.split_once(':').unwrap_or((name, ""));
            let scheme = scheme.parse().expect("a tcq scheme");
            (scheme, len.parse().unwrap_or_else(|_| train::table_len(scheme)))
        };
        names.iter().map(parse).collect()
    };
    let fresh = train::gaussian_tiles(2, 4096);
    for (scheme, len) in wanted {
        let book = train::train(scheme, len, &Training::committed(scheme));
        eprintln!(
            "{scheme} {len} entries: {:.6} on 2^20 fresh weights",
            train::relative_error(&book, &fresh)
        );
        println!("{book}");
    }
}
