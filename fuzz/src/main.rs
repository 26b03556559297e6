//! Writes the seeds of all targets into `corpus`, or, on any Rust, has targets read so many
//! mutations of theirs: `cargo run -- [COUNT [TARGET]]`.

use std::{env, fs, panic::catch_unwind, path::Path, time::Instant};

fn main() {
    let args: Vec<String> = env::args().skip(1).collect();
    let count: u64 = args.first().map_or(0, |count| count.parse().expect("COUNT should be a number"));
    for name in fracbit_fuzz::names().filter(|name| args.get(1).is_none_or(|wanted| wanted == name)) {
        let seeds = fracbit_fuzz::seeds(name);
        if count == 0 {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
            fs::create_dir_all(&folder).expect("a writable folder");
            for (i, seed) in seeds.iter().enumerate() {
                fs::write(folder.join(format!("seed-{i}")), seed).expect("a writable folder");
            }
            continue;
        }
        let start = Instant::now();
        for number in 0..count {
            let seed = &seeds[usize::try_from(number).expect("64 bits") % seeds.len()];
            let bytes = fracbit_fuzz::mutated(seed, number);
            if catch_unwind(|| fracbit_fuzz::run(name, &bytes)).is_err() {
                let path = env::temp_dir().join(format!("fracbit-fuzz-{name}-{number}"));
                fs::write(&path, &bytes).expect("a writable folder");
                println!("{name}: mutation {number} is {}", path.display());
            }
        }
        println!("{name}: {count} of {} seeds, {:.1} s", seeds.len(), start.elapsed().as_secs_f64());
    }
}
