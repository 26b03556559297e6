//! A bill of materials in the form of CycloneDX 1.5: what the program is made of.

use super::crates::{Key, Krate, PACKAGE};
use crate::json::{Json, map, text};
use std::collections::BTreeSet;

/// The document of these crates, of which one is the program.
pub(crate) fn document(crates: &[Krate], targets: &[&str], epoch: u64) -> Result<Json, String> {
    let program = crates.iter().find(|krate| krate.name == PACKAGE);
    let program = program.ok_or_else(|| format!("`{PACKAGE}` is not among its own crates"))?;
    let targets = targets.iter().map(|t| map([("name", text("cargo:target")), ("value", text(*t))]));
    let metadata = map([
        ("timestamp", text(iso_8601(epoch))),
        ("component", component(program, "application")),
        ("properties", Json::List(targets.collect())),
    ]);
    let others = crates.iter().filter(|krate| krate.name != PACKAGE);
    let key = |krate: &Krate| (krate.name.clone(), krate.version.clone());
    let edges = crates.iter().map(|krate| {
        let on = krate.dependencies.iter().map(|key| text(reference(key))).collect();
        map([("ref", text(reference(&key(krate)))), ("dependsOn", Json::List(on))])
    });
    Ok(map([
        ("bomFormat", text("CycloneDX")),
        ("specVersion", text("1.5")),
        ("version", Json::Number("1".to_owned())),
        ("metadata", metadata),
        ("components", Json::List(others.map(|krate| component(krate, "library")).collect())),
        ("dependencies", Json::List(edges.collect())),
    ]))
}

/// The address of a package, as <https://github.com/package-url/purl-spec> has it.
fn reference((name, version): &Key) -> String {
    format!("pkg:cargo/{name}@{}", version.replace('+', "%2B"))
}

fn component(krate: &Krate, kind: &str) -> Json {
    let purl = reference(&(krate.name.clone(), krate.version.clone()));
    let mut fields = vec![
        ("type", text(kind)),
        ("bom-ref", text(purl.as_str())),
        ("name", text(krate.name.as_str())),
        ("version", text(krate.version.as_str())),
    ];
    fields.extend(krate.description.as_deref().map(|d| ("description", text(d.trim()))));
    // What only builds the program is no part of it.
    fields.push(("scope", text(if krate.linked { "required" } else { "excluded" })));
    let hash = |sum: &String| map([("alg", text("SHA-256")), ("content", text(sum.as_str()))]);
    fields.extend(krate.checksum.as_ref().map(|sum| ("hashes", Json::List(vec![hash(sum)]))));
    let license = match &krate.license {
        Some(license) => map([("expression", text(expression(license)))]),
        None => map([("license", map([("name", text("see the licence file of the crate"))]))]),
    };
    fields.push(("licenses", Json::List(vec![license])));
    fields.push(("purl", text(purl)));
    let site = |url: &String| map([("type", text("vcs")), ("url", text(url.as_str()))]);
    fields.extend(krate.repository.as_ref().map(|url| ("externalReferences", Json::List(vec![site(url)]))));
    Json::Map(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
}

/// Old crates write a slash for `OR`.
pub(crate) fn expression(license: &str) -> String {
    license.split('/').map(str::trim).collect::<Vec<_>>().join(" OR ")
}

/// Checks what the form requires, and that all references have a target.
pub(crate) fn check(document: &Json) -> Result<(), String> {
    let wrong = |rule: &str| Err(format!("the bill of materials should have {rule}"));
    if document.text("bomFormat") != Some("CycloneDX") || document.text("specVersion") != Some("1.5") {
        return wrong("`bomFormat` CycloneDX and `specVersion` 1.5");
    }
    if !matches!(document.get("version"), Some(Json::Number(n)) if n.parse::<u32>().is_ok_and(|n| n > 0)) {
        return wrong("a positive `version`");
    }
    let Some(metadata) = document.get("metadata") else { return wrong("`metadata`") };
    if metadata.text("timestamp").is_none_or(|time| time.len() != 20 || !time.ends_with('Z')) {
        return wrong("a `timestamp`");
    }
    let Some(program) = metadata.get("component") else { return wrong("the program as `component`") };
    let mut known = BTreeSet::new();
    for component in std::iter::once(program).chain(document.list("components")) {
        let name = component.text("name").unwrap_or("?");
        for field in ["type", "bom-ref", "name", "version", "scope", "purl"] {
            if component.text(field).is_none_or(str::is_empty) {
                return wrong(&format!("`{field}` at `{name}`"));
            }
        }
        let licence = |l: &Json| {
            l.text("expression").or_else(|| l.get("license")?.text("name")).map(|text| !text.is_empty())
        };
        if component.list("licenses").first().and_then(licence) != Some(true) {
            return wrong(&format!("a licence at `{name}`"));
        }
        let hex = |hash: &Json| {
            hash.text("content").is_some_and(|c| c.len() == 64 && c.bytes().all(|b| b.is_ascii_hexdigit()))
        };
        if !component.list("hashes").iter().all(hex) {
            return wrong(&format!("SHA-256 sums of 64 hexadecimal digits, at `{name}`"));
        }
        if !known.insert(component.text("bom-ref").unwrap_or_default()) {
            return wrong(&format!("one component `{name}` of a version"));
        }
    }
    for edge in document.list("dependencies") {
        let on = edge.list("dependsOn").iter().map(Json::as_text);
        for reference in std::iter::once(edge.text("ref")).chain(on) {
            if reference.is_none_or(|reference| !known.contains(reference)) {
                return wrong(&format!("a component for the reference {reference:?}"));
            }
        }
    }
    Ok(())
}

/// Seconds since 1970 as `2026-11-28T12:00:00Z`.
fn iso_8601(epoch: u64) -> String {
    let (mut days, second) = (epoch / 86_400, epoch % 86_400);
    let leap = |year: u64| (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let mut month = 0;
    while days >= lengths[month] {
        days -= lengths[month];
        month += 1;
    }
    let (hour, minute) = (second / 3600, second / 60 % 60);
    format!("{year:04}-{:02}-{:02}T{hour:02}:{minute:02}:{:02}Z", month + 1, days + 1, second % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn krate(name: &str) -> Krate {
        Krate {
            name: name.to_owned(),
            version: "1.0.0+a".to_owned(),
            license: Some("MIT/Apache-2.0".to_owned()),
            checksum: Some("0f".repeat(32)),
            ..Krate::default()
        }
    }

    #[test]
    fn documents_have_what_they_need() {
        let mut program = krate(PACKAGE);
        program.dependencies.insert(("dep".to_owned(), "1.0.0+a".to_owned()));
        program.linked = true;
        let crates = [program, krate("dep")];
        let written = document(&crates, &["x86_64-unknown-linux-gnu"], 0).expect("a document");
        check(&written).expect("a valid document");
        let text = written.pretty();
        assert_eq!(Json::parse(&text).as_ref(), Ok(&written));
        for part in ["MIT OR Apache-2.0", "pkg:cargo/dep@1.0.0%2Ba", "1970-01-01T00:00:00Z", "\"excluded\""] {
            assert!(text.contains(part), "{part}: {text}");
        }
        // A dependency that is no component, one that is there twice, one whose sum is short.
        assert!(check(&document(&crates[..1], &[], 0).expect("a document")).is_err());
        let twice = [crates[0].clone(), crates[1].clone(), crates[1].clone()];
        assert!(check(&document(&twice, &[], 0).expect("a document")).is_err());
        let short = [crates[0].clone(), Krate { checksum: Some("0f".to_owned()), ..krate("dep") }];
        assert!(check(&document(&short, &[], 0).expect("a document")).is_err());
        assert!(document(&crates[1..], &[], 0).is_err(), "the program is missing");
        assert!(check(&map([])).is_err());
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        for (epoch, time) in [
            (951_827_696, "2000-02-29T12:34:56Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(iso_8601(epoch), time);
        }
    }
}
