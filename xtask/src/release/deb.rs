//! What a Debian package says of itself.

use std::fmt::Write as _;

/// Fields of the control file that differ between packages.
pub(crate) struct Control<'a> {
    pub(crate) version: &'a str,
    /// Debian's name of the architecture.
    pub(crate) architecture: &'a str,
    pub(crate) maintainer: &'a str,
    pub(crate) homepage: &'a str,
    /// One line, then paragraphs.
    pub(crate) description: (&'a str, &'a [&'a str]),
    /// The program, which names what it is linked with.
    pub(crate) program: &'a [u8],
    /// Bytes of all files.
    pub(crate) bytes: u64,
}

impl Control<'_> {
    /// The text of `DEBIAN/control`.
    pub(crate) fn text(&self) -> String {
        let (line, paragraphs) = self.description;
        let mut out = format!(
            "Package: fracbit\nVersion: {}\nArchitecture: {}\nMaintainer: {}\nInstalled-Size: {}\n\
             Depends: {}\nSection: science\nPriority: optional\nHomepage: {}\nDescription: {line}\n",
            debian_version(self.version),
            self.architecture,
            self.maintainer,
            self.bytes.div_ceil(1024),
            depends(self.program),
            self.homepage,
        );
        for (i, paragraph) in paragraphs.iter().enumerate() {
            // An empty line would end the field.
            out.push_str(if i > 0 { " .\n" } else { "" });
            wrapped(paragraph, 78)
                .iter()
                .for_each(|line| writeln!(out, " {line}").expect("a String takes all"));
        }
        out
    }
}

/// A version of Cargo in Debian's order: what comes before a release sorts before it.
pub(crate) fn debian_version(version: &str) -> String {
    version.replacen('-', "~", 1)
}

/// A text in lines of so many characters.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("never empty");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

/// Packages of the libraries that a program is linked with.
fn depends(program: &[u8]) -> String {
    let libc = libc_version(program);
    let mut packages =
        vec![libc.map_or("libc6".to_owned(), |(major, minor)| format!("libc6 (>= {major}.{minor})"))];
    for (library, package) in [("libgcc_s.so.1", "libgcc-s1"), ("libstdc++.so.6", "libstdc++6")] {
        if program.windows(library.len()).any(|window| window == library.as_bytes()) {
            packages.push(package.to_owned());
        }
    }
    packages.join(", ")
}

/// The newest version of the C library that a program asks for: its symbols name the versions
/// that they are of, such as `GLIBC_2.34`.
fn libc_version(program: &[u8]) -> Option<(u32, u32)> {
    const MARK: &[u8] = b"GLIBC_";
    let version = |at: usize| {
        let rest = &program[at + MARK.len()..];
        let end = rest.iter().position(|b| !(b.is_ascii_digit() || *b == b'.')).unwrap_or(rest.len());
        let mut parts = std::str::from_utf8(&rest[..end]).ok()?.split('.').map(str::parse);
        Some((parts.next()?.ok()?, parts.next()?.ok()?))
    };
    let marks = program.windows(MARK.len()).enumerate().filter(|(_, window)| *window == MARK);
    marks.filter_map(|(at, _)| version(at)).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_files_have_the_form_that_dpkg_reads() {
        let long = "word ".repeat(40);
        let control = Control {
            version: "0.2.0-rc.1",
            architecture: "arm64",
            maintainer: "us <us@example.org>",
            homepage: "https://example.org",
            description: ("short", &[&long, "second"]),
            program: b"\0libgcc_s.so.1\0GLIBC_2.34\0GLIBC_2.4\0",
            bytes: 1025,
        };
        let text = control.text();
        for line in [
            "Version: 0.2.0~rc.1",
            "Architecture: arm64",
            "Installed-Size: 2",
            "Depends: libc6 (>= 2.34), libgcc-s1",
            "Description: short",
            " .",
            " second",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        assert!(text.ends_with('\n') && text.lines().all(|line| !line.is_empty() && line.len() < 80));
        let more = text.lines().skip_while(|line| !line.starts_with("Description")).skip(1);
        assert!(more.clone().count() == 5 && more.clone().all(|line| line.starts_with(' ')), "{text}");
    }

    #[test]
    fn the_newest_version_of_the_c_library_counts() {
        assert_eq!(
            libc_version(b"\0GLIBC_2.4\0GLIBC_2.34\0GLIBC_2.2.5\0GLIBC_PRIVATE\0GLIBC_"),
            Some((2, 34))
        );
        assert_eq!(libc_version(b"nothing"), None);
    }
}
