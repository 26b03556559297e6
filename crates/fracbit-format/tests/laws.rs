//! What holds for every scheme, whatever it is.

use fracbit_base::{Scheme, Shape};
use fracbit_format::{Codebook, Extent, Grid, Grouping, Layout, PackedView, Planes, SchemeSpec, SecondLevel};
use half::f16;

/// Codebooks of a scheme's segments with the `nth` allowed length and entries up to `most`.
fn codebooks(layout: &Layout, nth: usize, most: i16) -> Vec<Codebook> {
    let make = |scheme: Scheme| {
        let table = SchemeSpec::of(scheme).table.expect("a segment has a table");
        let length = table.lengths[nth % table.lengths.len()];
        // Where entries are added, sums stay within the grid.
        let most = most / table.index.map_or(1, |index| index.count as i16);
        let entry = |i: usize| {
            let any = i16::try_from(i * 977 % (2 * most as usize + 1)).unwrap_or(0) - most.min(16_000);
            Codebook::integer(scheme, i).unwrap_or(any.clamp(-most, most))
        };
        Codebook::new(scheme, (0..length).map(entry).collect(), 0.01).expect("an allowed length")
    };
    layout.segments().iter().map(|s| make(s.scheme)).collect()
}

#[test]
fn a_name_leads_to_a_spec_and_back() {
    for scheme in Scheme::all() {
        let spec = SchemeSpec::of(scheme);
        assert_eq!(spec.scheme.to_string().parse(), Ok(scheme));
        assert_eq!(spec.precisions.last(), Some(&scheme.rate()), "{scheme}: read at its own rate");
        assert!(spec.precisions.is_sorted(), "{scheme}: precisions ascend");
        assert!([1, 2, 4, 8, 16].contains(&spec.block_columns), "{scheme}: a block lies within a tile");
        let own = scheme.components().all(|component| component.scheme == scheme);
        assert_eq!(spec.table.is_some(), own, "{scheme}: a table, or those of its components");
        let Some(table) = spec.table else { continue };
        assert!(!table.lengths.is_empty() && table.lengths.is_sorted(), "{scheme}: lengths");
        assert_eq!(table.grids[0], Grid::I8, "{scheme}: the narrow grid first");
        let near = table.lengths.iter().flat_map(|&n| [n - 1, n, n + 1, 2 * n]);
        for length in near.chain([0, 1]) {
            let entries = (0..length).map(|i| Codebook::integer(scheme, i).unwrap_or(1)).collect();
            let made = Codebook::new(scheme, entries, 1.0);
            assert_eq!(made.is_ok(), table.lengths.contains(&length), "{scheme}: {length} entries");
        }
    }
}

#[test]
fn bytes_are_the_sum_of_the_planes() {
    for scheme in Scheme::all() {
        let spec = SchemeSpec::of(scheme);
        for shape in [Shape::new(1, 1), Shape::new(16, 16), Shape::new(17, 48), Shape::new(40, 100)] {
            for grouping in [Grouping::Row, Grouping::Columns(16), Grouping::Columns(64), spec.grouping] {
                let layout = Layout::new(scheme, shape);
                let scales = shape.rows * shape.cols.div_ceil(grouping.columns(shape.cols));
                assert_eq!(grouping.groups(shape.cols) * shape.rows, scales);
                assert_eq!(Grouping::from_number(grouping.number()), grouping);
                let bytes = spec.bytes(shape, grouping).0;
                let planes = scheme.planes();
                let seconds = spec.second_level.map_or(0, |groups| shape.rows * groups.groups(shape.cols));
                let want = layout.len() + seconds + planes * (2 * scales + 4);
                assert_eq!(bytes, want as u64, "{scheme} {shape}");
                for plane in &spec.planes {
                    let dims = plane.dims(scheme, shape, grouping);
                    let elements: usize = dims.iter().product();
                    assert_eq!(elements * plane.element.bytes(), plane.bytes(scheme, shape, grouping));
                    let of_groups = matches!(plane.extent, Extent::Groups | Extent::SecondLevelGroups);
                    assert_eq!(of_groups, dims.len() == 2, "{scheme}");
                }
            }
        }
    }
}

#[test]
fn any_bytes_decode() {
    for scheme in Scheme::all() {
        let shape = Shape::new(18, 40);
        let layout = Layout::new(scheme, shape);
        for (nth, most) in [(0, 127), (1, 127), (2, 100)] {
            let owned = codebooks(&layout, nth, most);
            let books: Vec<&Codebook> = owned.iter().collect();
            for fill in [0x00u8, 0xff, 0x5a] {
                let codes: Vec<u8> = (0..layout.len()).map(|i| (i as u8).wrapping_mul(89) ^ fill).collect();
                let scale = |i: usize| f16::from_f32(i as f32 * 0.37 - 5.0);
                let second = SchemeSpec::of(scheme).second_level;
                let group = if second.is_some() { 48 } else { 16 };
                let scales = scheme.planes() * shape.rows * shape.cols.div_ceil(group);
                let scales: Vec<f16> = (0..scales).map(scale).collect();
                let gains = vec![0.5; scheme.planes()];
                let seconds = second.map_or(0, |groups| shape.rows * groups.groups(shape.cols));
                let second_level: Vec<u8> = (0..seconds).map(|i| (i as u8).wrapping_mul(57) ^ fill).collect();
                let planes =
                    Planes { codes: &codes, second_level: &second_level, scales: &scales, gains: &gains };
                let view = PackedView::new(scheme, shape, &books, planes, group).unwrap();
                let all = view.dequantize();
                assert!(all.iter().all(|v| v.is_finite()), "{scheme}");
                let mut row = vec![0.0; shape.cols];
                for r in 0..shape.rows {
                    view.dequantize_row(r, &mut row);
                    assert_eq!(row, all[r * shape.cols..][..shape.cols], "{scheme}, row {r}");
                }
                assert!(all.iter().any(|&v| v != 0.0), "{scheme}: something was decoded");
            }
        }
    }
}

/// QServe's protective range (section 4.1): from weights within +-119 the extremes of a group never
/// make a weight beyond int8, whatever they are; from weights within +-127 they do.
#[test]
fn protected_weights_stay_int8_on_the_second_level() {
    let extremes = |most: i16| {
        let mut reached = 0;
        for low in -most..=most {
            for high in low..=most {
                // Scale and zero by the extremes of the group, as the paper rounds them.
                let scale = ((f64::from(high) - f64::from(low)) / 15.0).round().max(1.0);
                let zero = (-f64::from(low) / scale).round().clamp(0.0, 15.0);
                for weight in [low, high] {
                    let code = (f64::from(weight) / scale + zero).round().clamp(0.0, 15.0);
                    let value = scale * (code - zero);
                    reached = reached.max(value.max(-1.0 - value) as i16);
                }
            }
        }
        reached
    };
    assert!(extremes(SecondLevel::PROTECTED) <= 127);
    assert!(extremes(127) > 127);
    // The paper's example: -113 to 120 has scale 16 and zero 7, and 120 becomes 128.
    let paper = SecondLevel { scale: 16, zero: 7 };
    assert_eq!(paper.value(15), 128);
    assert_eq!(paper.codes(), (0, 14), "so this code is not taken");
    for byte in 0..=u8::MAX {
        let second = SecondLevel::from_byte(byte);
        assert_eq!(second.byte(), byte);
        let (first, last) = second.codes();
        let fits = |code: u8| second.value(code).abs() <= 127;
        (0..16).for_each(|code| assert_eq!(fits(code), (first..=last).contains(&code), "{second:?} {code}"));
    }
}
