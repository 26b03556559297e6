//! What is part of the file format, pinned: the factorisation rule, the small matrices, the signs,
//! whole rotations.
//!
//! The checksums of matrices and signs were computed by a second implementation in another
//! language, written from the module documentation.

use fracbit_rotation::{
    Construction, Factor, Hadamard, HadamardMatrix, MAX_WIDTH, Rotation, RotationError, factorize, signs,
};

fn fnv(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

#[test]
fn factorisations() {
    let cases = [
        (1, ""),
        (2, "walsh 2"),
        (3, "hartley 3"),
        (6, "hartley 3 x walsh 2"),
        (12, "hadamard 12"),
        (40, "hadamard 20 x walsh 2"),
        (90, "hartley 45 x walsh 2"),
        (188, "hartley 47 x walsh 4"), // a matrix of order 188 exists, but by no construction here
        (192, "hadamard 12 x walsh 16"),
        (576, "hadamard 36 x walsh 16"),
        (752, "hadamard 752"), // 47: the first order with a matrix is 16·47
        (896, "hadamard 28 x walsh 32"),
        (960, "hadamard 60 x walsh 16"),
        (1536, "hadamard 12 x walsh 128"),
        (2560, "hadamard 20 x walsh 128"),
        (3072, "hadamard 12 x walsh 256"),
        (3584, "hadamard 28 x walsh 128"),
        (4096, "walsh 4096"),
        (4864, "hadamard 76 x walsh 64"),
        (5120, "hadamard 20 x walsh 256"),
        (5632, "hadamard 44 x walsh 128"),
        (6144, "hadamard 12 x walsh 512"),
        (6912, "hadamard 108 x walsh 64"),
        (8192, "walsh 8192"),
        (8960, "hadamard 140 x walsh 64"),
        (9728, "hadamard 76 x walsh 128"),
        (10944, "hadamard 36 x hadamard 76 x walsh 4"),
        (11008, "hadamard 172 x walsh 64"),
        (12288, "hadamard 12 x walsh 1024"),
        (13440, "hadamard 28 x hadamard 60 x walsh 8"),
        (13696, "hartley 107 x walsh 128"),
        (13824, "hadamard 108 x walsh 128"),
        (14336, "hadamard 28 x walsh 512"),
        (17408, "hadamard 68 x walsh 256"),
        (18944, "hadamard 148 x walsh 128"),
        (22016, "hadamard 172 x walsh 128"),
        (24576, "hadamard 12 x walsh 2048"),
        (25600, "hadamard 100 x walsh 256"),
        (27648, "hadamard 108 x walsh 256"),
        (28672, "hadamard 28 x walsh 1024"),
        (29568, "hadamard 44 x hadamard 84 x walsh 8"),
        (29696, "hadamard 116 x walsh 256"),
        (49152, "hadamard 12 x walsh 4096"),
        (53248, "hadamard 52 x walsh 1024"),
    ];
    for (n, want) in cases {
        let factors = factorize(n).unwrap();
        assert_eq!(factors.iter().map(|f| f.order()).product::<usize>(), n);
        assert_eq!(factors.iter().map(Factor::to_string).collect::<Vec<_>>().join(" x "), want, "n = {n}");
    }
    // Every width of the first few thousand at once.
    let all = (1..=4096).flat_map(|n| {
        factorize(n).unwrap().into_iter().map(|f| f.to_string()).collect::<Vec<_>>().join(" x ").into_bytes()
    });
    assert_eq!(fnv(all), FIRST_WIDTHS);
}
const FIRST_WIDTHS: u64 = 0xdb4d_ecc2_154e_4a48;

#[test]
fn widths_out_of_range_are_refused() {
    for n in [0, MAX_WIDTH + 1, usize::MAX] {
        assert!(matches!(factorize(n), Err(RotationError::Width { got, .. }) if got == n));
        assert!(Hadamard::new(n).is_err() && Rotation::new(n, 0, 0).is_err());
    }
    assert_eq!(factorize(0).unwrap_err().to_string(), "factorize: width should be 1 to 1048576, got 0");
}

#[test]
fn matrices() {
    let checksums = [
        (4, 0x01e4_a835_aa93_b059),
        (12, 0xc864_87de_9bdd_aa81),
        (20, 0x61f2_379a_6d18_ba79),
        (28, 0x5f4d_3af7_54fd_36d1),
        (36, 0xd655_31a4_ce7f_9935),
        (44, 0xa179_703c_8743_7531),
        (52, 0x1926_5462_8218_e9f5),
        (60, 0x6375_ce44_f4c2_6931),
        (68, 0xa58c_7d4d_ed9e_d579),
        (76, 0x75af_2288_acd8_d995),
        (84, 0xe3aa_2b7e_4bc0_1369),
        (92, 0x2851_38f4_c6c4_8fe9),
        (100, 0xae38_5d2b_4bc3_cc35),
        (108, 0x9710_4c43_5787_2c11),
        (116, 0xeb05_e897_bd66_e479),
        (124, 0x5801_dd17_408d_63d5),
        (132, 0x9cb5_24f6_d9f4_b999),
        (140, 0x72b5_bb4d_5c95_9c51),
        (148, 0xeef8_bfd8_7de2_e875),
        (156, 0x09c8_e773_53bd_cb59),
        (164, 0x4a96_a280_d1e3_d459),
        (172, 0x49e7_f9ae_c0e9_f4b9),
        (180, 0xbd06_6dd8_4d54_2969),
        (244, 0x03ad_1ca7_fa09_dc41),
        (252, 0x80b9_399b_dc91_47e1),
    ];
    for (order, want) in checksums {
        let h = HadamardMatrix::new(order).unwrap();
        let entries = (0..order * order).map(|at| u8::from(h.entry(at / order, at % order) < 0));
        assert_eq!(fnv(entries), want, "order {order}");
    }
    let construction = |order| HadamardMatrix::new(order).map(|h| h.construction());
    assert_eq!(construction(28), Some(Construction::PaleyI(27)));
    assert_eq!(construction(52), Some(Construction::PaleyII(25)));
    assert_eq!(construction(116), Some(Construction::Williamson(29)));
}

/// H Hᵀ = K·I in integers, entries ±1, for every order the rule can use; and which multiples of 4
/// are missing.
#[test]
fn every_matrix_is_hadamard() {
    let mut missing = Vec::new();
    for order in (4..=256).step_by(4).chain([308, 316, 488, 752, 924, 1020]) {
        let Some(h) = HadamardMatrix::new(order) else {
            if order % 8 == 4 {
                missing.push(order);
            }
            continue;
        };
        assert_eq!(h.order(), order);
        let rows: Vec<Vec<i8>> = (0..order).map(|i| (0..order).map(|j| h.entry(i, j)).collect()).collect();
        assert!(rows.iter().flatten().all(|x| x.abs() == 1), "order {order}: entries are ±1");
        for (i, a) in rows.iter().enumerate() {
            for (j, b) in rows[..=i].iter().enumerate() {
                let dot: i32 = a.iter().zip(b).map(|(a, b)| i32::from(a * b)).sum();
                assert_eq!(dot, if i == j { order as i32 } else { 0 }, "order {order}: rows {i} and {j}");
            }
        }
    }
    // Of the orders 4·odd; a missing multiple of 8 is twice a smaller order, which Walsh's factor
    // makes.
    assert_eq!(missing, [188, 236]);
    for order in [0, 1, 2, 3, 6, 10, 22, 66, 1028, usize::MAX - 3] {
        assert!(HadamardMatrix::new(order).is_none(), "order {order}");
    }
}

#[test]
fn sign_streams() {
    let word = |seed, stream, at: usize| {
        signs(seed, stream).skip(64 * at).take(64).enumerate().fold(0u64, |w, (bit, s)| {
            assert!(s == 1.0 || s == -1.0);
            w | u64::from(s < 0.0) << bit
        })
    };
    for (seed, stream, want) in [
        (0, 0, [0x568a_9b0b_1a2c_05ec, 0x44e5_b8b1_47ef_718b]),
        (42, 3, [0x8a12_6a34_4796_755f, 0x2851_0256_fe8a_1735]),
        (u64::MAX, u64::MAX, [0xbb01_391f_6277_d93c, 0x03c5_54c6_013f_24b5]),
    ] {
        assert_eq!([word(seed, stream, 0), word(seed, stream, 1)], want, "seed {seed}, stream {stream}");
    }
    let rotation = Rotation::new(100, 42, 3).unwrap();
    assert!(rotation.signs().eq(signs(42, 3).take(100)));
}

/// The bits that come out, for one width of every kind: a regression test, and the promise of equal
/// bits on every target. That the values are right is the dense oracle's business.
#[test]
fn whole_rotations() {
    let got: Vec<_> = [16, 12, 90, 192, 576, 752, 1155, 3696, 8192]
        .into_iter()
        .map(|n| {
            let mut x: Vec<f32> = (0..n).map(|i| ((i * i + 3 * i) % 101) as f32 - 50.0).collect();
            Rotation::new(n, 42, 3).unwrap().apply(&mut x);
            (n, fnv(x.iter().flat_map(|x| x.to_le_bytes())))
        })
        .collect();
    assert_eq!(got, WHOLE);
}
const WHOLE: [(usize, u64); 9] = [
    (16, 0x4567_72d2_fad0_a0a1),
    (12, 0x064d_60a0_969c_7adf),
    (90, 0xce86_428b_bf7e_0fcf),
    (192, 0xf214_8b42_ab04_0d65),
    (576, 0x67bf_1cd5_4da0_17bc),
    (752, 0x81d4_a97c_97fd_b027),
    (1155, 0xad14_58dc_bb6e_503e),
    (3696, 0x18d5_534d_27f1_5778),
    (8192, 0x79c3_2f7d_8c12_c9f6),
];
