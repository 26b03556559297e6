//! What every trellis rounder promises.

use fracbit_base::{Code, Family, Scheme};
use fracbit_codebook::Rounder;
use fracbit_format::{Grid, TILE};
use fracbit_trellis::{Effort, Isa, TrellisRounder, builtin, rounder, train};

fn schemes() -> impl Iterator<Item = Scheme> {
    Scheme::all().filter(|s| matches!(s.family(), Family::Tcq(_)))
}

fn encode(rounder: &TrellisRounder, tiles: &[[f32; TILE]]) -> Vec<u8> {
    let mut codes = vec![0xAA; tiles.len() * rounder.codebook().tile_bytes()];
    rounder.encode(tiles, &mut codes);
    codes
}

fn decode(rounder: &TrellisRounder, codes: &[u8]) -> Vec<[i16; TILE]> {
    let book = rounder.codebook();
    let expand = |code| {
        let mut tile = [0; TILE];
        book.expand_tile(code, &mut tile);
        tile
    };
    codes.chunks_exact(book.tile_bytes()).map(expand).collect()
}

#[test]
fn every_trellis_scheme_has_a_codebook_and_no_other_has() {
    for scheme in Scheme::all() {
        let book = builtin(scheme);
        assert_eq!(book.is_some(), matches!(scheme.family(), Family::Tcq(_)), "{scheme}");
        if let Some(book) = book {
            assert_eq!(book.entries().len(), train::table_len(scheme), "{scheme}");
            let grid = if scheme.code() == Some(Code::Hyb) { Grid::I16 } else { Grid::I8 };
            assert_eq!(book.grid(), grid, "{scheme}");
        }
    }
}

#[test]
fn same_bytes_on_every_instruction_set_and_thread_count() {
    let tiles = train::gaussian_tiles(11, 5);
    for (scheme, effort) in schemes().flat_map(|s| Effort::ALL.map(|e| (s, e))) {
        let book = builtin(scheme).unwrap();
        // The portable microkernel is slow: one tile of each scheme, all of a few.
        let count = if scheme.quarters() == 8 && effort == Effort::Exact { tiles.len() } else { 1 };
        let tiles = &tiles[..count];
        let want = encode(&TrellisRounder::with_isa(book.clone(), effort, Isa::Scalar), tiles);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            let rounder = TrellisRounder::with_isa(book.clone(), effort, isa);
            for threads in [1, 2] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let got = pool.install(|| encode(&rounder, tiles));
                assert_eq!(got, want, "{scheme}, {effort}, on {} with {threads} threads", isa.name());
            }
        }
    }
}

#[test]
fn efforts_lose_what_they_may() {
    // 2.5 and 7 %, and what the means of so many tiles may deviate (one tile has 4 % more or less).
    let all = train::gaussian_tiles(13, 192);
    for scheme in schemes() {
        let book = builtin(scheme).unwrap();
        for (effort, most, count) in [(Effort::Balanced, 1.03, 48), (Effort::Fast, 1.073, all.len())] {
            let error = |effort| train::error_of(&TrellisRounder::new(book.clone(), effort), &all[..count]);
            let ratio = error(effort) / error(Effort::Exact);
            assert!((0.99..most).contains(&ratio), "{scheme}: {effort} has {ratio} times the exact error");
        }
    }
}

/// Tiles with a weight far out where costs of 8 bits go out of range: before what is out of range
/// stayed so, and where the seam does not suit such a weight, they had three to six times the exact
/// error.
#[test]
fn no_tile_loses_much_to_the_range_of_costs() {
    let tiles = train::gaussian_tiles(20_000, 4096);
    for (scheme, tile) in [
        ("tcq-2.75", 311),
        ("tcq-3", 1766),
        ("tcq-4", 2151),
        ("tcq-4", 3124),
        ("tcq-4.5", 2601),
        ("tcq-5", 339),
    ] {
        let book = builtin(scheme.parse().unwrap()).unwrap();
        let error = |effort| train::error_of(&TrellisRounder::new(book.clone(), effort), &tiles[tile..=tile]);
        for effort in [Effort::Fast, Effort::Balanced] {
            let ratio = error(effort) / error(Effort::Exact);
            assert!(ratio < 1.3, "{scheme}: {effort} has {ratio} times the exact error of tile {tile}");
        }
    }
}

#[test]
fn coding_a_decoded_tile_changes_nothing() {
    for scheme in schemes() {
        let rounder = rounder(scheme, Effort::Exact).unwrap();
        let once = decode(&rounder, &encode(&rounder, &train::gaussian_tiles(12, 2)));
        let step = rounder.codebook().step();
        let weights: Vec<[f32; TILE]> = once.iter().map(|tile| tile.map(|i| f32::from(i) * step)).collect();
        let twice = decode(&rounder, &encode(&rounder, &weights));
        assert!(once == twice, "{scheme}: a tile of code words is not a fixed point");
    }
}

#[test]
fn extreme_tiles_have_codes() {
    for (scheme, effort) in schemes().flat_map(|s| Effort::ALL.map(|e| (s, e))) {
        let rounder = rounder(scheme, effort).unwrap();
        let sign = |i: usize| if i.is_multiple_of(3) { -1.0 } else { 1.0 };
        let huge: [f32; TILE] = std::array::from_fn(|i| sign(i) * f32::MAX);
        let large: [f32; TILE] = std::array::from_fn(|i| sign(i) * 1e3);
        let codes = encode(&rounder, &[[0.0; TILE], huge, large]);
        let decoded = decode(&rounder, &codes);
        assert!(decoded[1] == decoded[2], "{scheme}: clipped weights are equal");
        let right = decoded[1].iter().enumerate().filter(|&(i, &v)| f32::from(v) * sign(i) > 0.0).count();
        assert!(right > TILE / 2 + 48, "{scheme}: only {right} signs of huge weights are right");
        let step = f64::from(rounder.codebook().step());
        let zero: f64 = decoded[0].iter().map(|&v| (f64::from(v) * step).powi(2)).sum::<f64>() / TILE as f64;
        assert!(zero < 3.0 * scheme.rate().gaussian_bound(), "{scheme}: zeros decode to variance {zero}");
    }
}

#[test]
#[should_panic(expected = "a tcq scheme")]
fn refuses_a_scalar_codebook() {
    let book = fracbit_format::Codebook::new("nuq-2".parse().unwrap(), vec![-3, -1, 1, 3], 0.5).unwrap();
    let _ = TrellisRounder::new(book, Effort::Exact);
}

/// Equal costs are as rare as one tile in a hundred: a few tiles show nothing.
#[test]
fn ties_between_classes_have_one_winner_on_every_instruction_set() {
    let tiles = train::gaussian_tiles(12, 200);
    for scheme in schemes().filter(|s| s.code() == Some(Code::Fine) && [4, 8, 10].contains(&s.quarters())) {
        let rounder = |isa| TrellisRounder::with_isa(builtin(scheme).unwrap().clone(), Effort::Fast, isa);
        let want = encode(&rounder(Isa::Scalar), &tiles);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            assert_eq!(encode(&rounder(isa), &tiles), want, "{scheme} on {}", isa.name());
        }
    }
}

/// In the `hyb` code every path has another one of the same cost, that of the complements.
#[test]
fn ties_between_rows_have_one_winner_on_every_instruction_set() {
    let tiles = train::gaussian_tiles(14, 200);
    for scheme in ["tcq-hyb-3.5", "tcq-hyb-4.5", "tcq-fast-4"].map(|name| name.parse::<Scheme>().unwrap()) {
        let rounder = |isa| TrellisRounder::with_isa(builtin(scheme).unwrap().clone(), Effort::Fast, isa);
        let want = encode(&rounder(Isa::Scalar), &tiles);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_supported()) {
            assert_eq!(encode(&rounder(isa), &tiles), want, "{scheme} on {}", isa.name());
        }
    }
}
