//! Our header reader against the `safetensors` crate on valid, mutated and arbitrary files.

mod common;

use common::file;
use fracbit_io::{Header, HeaderError};
use proptest::prelude::*;
use safetensors::SafeTensors;

/// Both readers accept, with equal content; or both refuse; or we refuse for a documented reason.
fn compare(bytes: &[u8]) -> Result<(), TestCaseError> {
    let theirs = SafeTensors::read_metadata(bytes);
    match (Header::parse(bytes), theirs) {
        (Ok(ours), Ok((n, meta))) => {
            prop_assert_eq!(ours.data_start, n + 8);
            let tensors = meta.tensors();
            prop_assert_eq!(ours.tensors.len() + ours.unread.len(), tensors.len());
            for (name, dtype) in &ours.unread {
                prop_assert_eq!(*dtype, tensors[name].dtype.to_string());
            }
            for (name, t) in &ours.tensors {
                let other = tensors[name];
                prop_assert_eq!(t.dtype.name(), other.dtype.to_string());
                prop_assert_eq!(&t.shape, &other.shape);
                let (s, e) = other.data_offsets;
                prop_assert_eq!(t.range.clone(), s + n + 8..e + n + 8);
            }
            let metadata = meta.metadata().clone().unwrap_or_default();
            prop_assert_eq!(ours.metadata.into_iter().collect::<std::collections::HashMap<_, _>>(), metadata);
        }
        (Err(_), Err(_)) => {}
        (Err(HeaderError::DuplicateKey { .. } | HeaderError::BadMetadata { .. }), Ok(_)) => {}
        (Err(HeaderError::BadShape { detail, .. }), Ok((_, meta))) => {
            let long = meta.tensors().values().any(|t| t.shape.len() > 16);
            let zero = meta.tensors().values().any(|t| t.shape.contains(&0));
            prop_assert!(long || zero && detail.contains("overflows"), "{}", detail);
        }
        (ours, theirs) => {
            return Err(TestCaseError::fail(format!(
                "ours {ours:?}, theirs {:?}",
                theirs.map(|_| "accepts")
            )));
        }
    }
    Ok(())
}

fn valid() -> impl Strategy<Value = (String, usize)> {
    let dtypes = prop::sample::select(vec![
        ("F32", 4),
        ("F16", 2),
        ("BF16", 2),
        ("I64", 8),
        ("U8", 1),
        ("BOOL", 1),
        ("F64", 8),
        ("F8_E5M2", 1),
        ("C64", 8),
    ]);
    let tensor = (dtypes, prop::collection::vec(0_usize..5, 0..4));
    (prop::collection::vec(tensor, 0..6), any::<bool>(), any::<bool>()).prop_map(|(list, meta, reverse)| {
        let mut at = 0;
        let mut entries = Vec::new();
        for (i, ((dtype, size), shape)) in list.iter().enumerate() {
            let end = at + size * shape.iter().product::<usize>();
            let entry = format!(
                "\"t{i}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{at},{end}]}}"
            );
            entries.push(entry);
            at = end;
        }
        if reverse {
            entries.reverse();
        }
        if meta {
            entries.push("\"__metadata__\":{\"format\":\"pt\"}".to_owned());
        }
        (format!("{{{}}}", entries.join(",")), at)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn valid_files((header, data) in valid()) {
        let bytes = file(&header, &vec![7; data]);
        prop_assert!(Header::parse(&bytes).is_ok(), "{}", header);
        compare(&bytes)?;
    }

    #[test]
    fn mutated_files((header, data) in valid(), edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4), 1..4)) {
        let mut bytes = file(&header, &vec![7; data]);
        for (at, byte, kind) in edits {
            let at = at.index(bytes.len());
            match kind {
                0 => bytes[at] = byte,
                1 => bytes.insert(at, byte),
                2 => drop(bytes.remove(at)),
                // Digits where digits matter: the interesting lies are about numbers.
                _ => bytes[at] = b'0' + byte % 10,
            }
            if bytes.is_empty() { break; }
        }
        compare(&bytes)?;
        // The same with a length prefix that fits, so that the JSON is reached.
        if bytes.len() > 8 + data {
            let n = (bytes.len() - 8 - data) as u64;
            bytes[..8].copy_from_slice(&n.to_le_bytes());
            compare(&bytes)?;
        }
    }

    #[test]
    fn arbitrary_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        compare(&bytes)?;
        compare(&file(&String::from_utf8_lossy(&bytes), b"1234"))?;
    }
}
