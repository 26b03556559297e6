//! Random signs from a seed; specified at [`signs`], because the stream is part of the file format.

const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// The endless random signs (1 or −1) of a stream. **Part of the file format.**
///
/// `stream` tells apart the places of a model that share one seed; its meaning is the caller's.
///
/// The generator is SplitMix64 (Steele, Lea, Flood 2014), whose r-th output (r = 1, 2, …) from
/// state s is mix(s + r·γ) modulo 2^64, with γ = 0x9e3779b97f4a7c15 and
///
/// ```text
/// mix(z):  z ^= z >> 30;  z *= 0xbf58476d1ce4e5b9;  z ^= z >> 27;  z *= 0x94d049bb133111eb;  z ^= z >> 31
/// ```
///
/// Sign i of a stream is −1 if bit i mod 64 (least significant is 0) of word ⌊i/64⌋ + 1 is set,
/// where the words are the outputs from the state mix(mix(seed + γ) ^ stream). Written out here,
/// and not taken from a crate, so that no dependency's version is part of the format. The signs of
/// a longer width begin with those of a shorter one.
pub fn signs(seed: u64, stream: u64) -> impl Iterator<Item = f32> {
    let state = mix(mix(seed.wrapping_add(GAMMA)) ^ stream);
    (1u64..).flat_map(move |r| {
        let word = mix(state.wrapping_add(r.wrapping_mul(GAMMA)));
        (0..64).map(move |bit| if word >> bit & 1 == 1 { -1.0 } else { 1.0 })
    })
}
