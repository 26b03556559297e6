//! Searches the four symmetric ±1 sequences of a Williamson Hadamard matrix of order 4·t.
//!
//! ```text
//! cargo run --release -p fracbit-rotation --example williamson_search -- T [M [images]]
//! ```
//!
//! Needed: a, b, c, d ∈ {±1}^t, symmetric (a_i = a_{t-i}), a_0 = 1, whose periodic autocorrelations
//! sum to zero at every shift but 0 (Williamson 1944). With a multiplier M only sequences constant
//! on the orbits of ⟨−1, M⟩ in Z_t are tried, which turns the 2^21 sequences of t = 43 into 2^7.
//! Method: meet in the middle. Row sums must satisfy Σ r² = 4t, so only pairs with fitting row sums
//! meet; the autocorrelations are compared through a hash that is linear in them, and a hit is then
//! verified exactly. With `images` a narrower and cheaper form is tried instead: b is any symmetric
//! sequence, c and d are b with its indices multiplied by M and M², and only a is constant on the
//! orbits; row sums then satisfy r² + 3s² = 4t. The first hit in the (deterministic) search order
//! is printed as the four first rows, '+' for 1 and '-' for −1.
#![expect(clippy::print_stdout, reason = "an example that prints its result")]

use std::collections::HashMap;

fn orbits(t: usize, m: usize) -> Vec<Vec<usize>> {
    let mut seen = vec![false; t];
    let mut all = Vec::new();
    for start in 1..t {
        let (mut orbit, mut next) = (Vec::new(), vec![start]);
        while let Some(i) = next.pop() {
            if !std::mem::replace(&mut seen[i], true) {
                orbit.push(i);
                next.extend([t - i, i * m % t]);
            }
        }
        if !orbit.is_empty() {
            all.push(orbit);
        }
    }
    all
}

fn expand(code: u64, orbits: &[Vec<usize>], t: usize) -> Vec<i32> {
    let mut a = vec![1; t];
    for (o, orbit) in orbits.iter().enumerate() {
        if code >> o & 1 == 1 {
            orbit.iter().for_each(|&i| a[i] = -1);
        }
    }
    a
}

/// Autocorrelations at shifts 1..=(t-1)/2; the others are equal to these by symmetry.
fn autocorrelations(a: &[i32]) -> Vec<i32> {
    let t = a.len();
    (1..=t / 2).map(|s| (0..t).map(|i| a[i] * a[(i + s) % t]).sum()).collect()
}

/// Linear in the autocorrelations: four sequences fit only if their keys sum to zero.
fn key(correlations: &[i32]) -> u64 {
    let mut weight = 1u64;
    correlations.iter().fold(0, |sum, &c| {
        weight = weight.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0xda3e_39cb_94b9_5bdb) | 1;
        sum.wrapping_add((c as u64).wrapping_mul(weight))
    })
}

fn search(t: usize, m: usize) -> Option<[Vec<i32>; 4]> {
    let orbits = orbits(t, m);
    let mut by_row_sum: HashMap<i32, Vec<(u64, u64)>> = HashMap::new(); // |row sum| -> (code, key)
    for code in 0..1u64 << orbits.len() {
        let a = expand(code, &orbits, t);
        by_row_sum.entry(a.iter().sum::<i32>().abs()).or_default().push((code, key(&autocorrelations(&a))));
    }
    let none = Vec::new();
    let of = |r: i32| by_row_sum.get(&r).unwrap_or(&none);
    let odd = |limit: i32| (1..=limit).step_by(2);
    let want = 4 * t as i32;
    for r in odd(t as i32) {
        for s in odd(r) {
            for u in odd(s) {
                let Some(v) = odd(u).find(|v| r * r + s * s + u * u + v * v == want) else { continue };
                // The rarest with the commonest on both sides keeps the table small.
                let mut pairs = HashMap::new();
                for &(a, ka) in of(r) {
                    for &(d, kd) in of(v) {
                        pairs.entry(ka.wrapping_add(kd)).or_insert((a, d));
                    }
                }
                for &(b, kb) in of(s) {
                    for &(c, kc) in of(u) {
                        let Some(&(a, d)) = pairs.get(&kb.wrapping_add(kc).wrapping_neg()) else { continue };
                        let four = [a, b, c, d].map(|code| expand(code, &orbits, t));
                        let mut sums = vec![0; t / 2];
                        for row in &four {
                            sums.iter_mut().zip(autocorrelations(row)).for_each(|(s, c)| *s += c);
                        }
                        if sums.iter().all(|&s| s == 0) {
                            return Some(four);
                        }
                    }
                }
            }
        }
    }
    None
}

fn search_images(t: usize, m: usize) -> Option<[Vec<i32>; 4]> {
    let (coarse, fine) = (orbits(t, m), orbits(t, 1));
    let of_a: HashMap<_, _> = (0..1u64 << coarse.len())
        .rev()
        .map(|code| expand(code, &coarse, t))
        .map(|a| (autocorrelations(&a), a))
        .collect();
    for code in 0..1u64 << fine.len() {
        let b = expand(code, &fine, t);
        if 3 * b.iter().sum::<i32>().pow(2) > 4 * t as i32 {
            continue;
        }
        let image = |x: &[i32]| (0..t).map(|i| x[i * m % t]).collect::<Vec<_>>();
        let (c, d) = (image(&b), image(&image(&b)));
        let mut rest = vec![0; t / 2];
        for row in [&b, &c, &d] {
            rest.iter_mut().zip(autocorrelations(row)).for_each(|(s, c)| *s -= c);
        }
        if let Some(a) = of_a.get(&rest) {
            return Some([a.clone(), b, c, d]);
        }
    }
    None
}

fn main() {
    let mut args = std::env::args().skip(1);
    let mut number = |otherwise| {
        args.next().map_or(otherwise, |a| a.parse::<usize>().expect("T and M should be integers"))
    };
    let (t, m) = (number(23), number(1));
    let images = args.next().is_some_and(|a| a == "images");
    assert!(t % 2 == 1 && t < 128, "T should be odd and small, got {t}");
    match if images { search_images(t, m) } else { search(t, m) } {
        None => println!("t = {t}, multiplier {m}: none"),
        Some(rows) => {
            println!("t = {t}, multiplier {m}:");
            for row in rows {
                println!(
                    "    \"{}\",",
                    row.iter().map(|&x| if x > 0 { '+' } else { '-' }).collect::<String>()
                );
            }
        }
    }
}
