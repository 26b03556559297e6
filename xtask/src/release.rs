//! What a person downloads: archives and Debian packages of the program, the licences of what it
//! contains, its bill of materials, and sums of all.

mod crates;
mod deb;
mod licences;
mod sbom;

use crate::{Outcome, arm, gpu, root, run, setup};
use crates::Krate;
use std::{
    ffi::OsStr,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
};

/// An architecture that the program is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Arch {
    /// The name of Rust.
    name: &'static str,
    debian: &'static str,
    target: &'static str,
    /// In the header of an ELF file.
    machine: u16,
    /// What strips a program of it elsewhere.
    strip: &'static str,
}

const ARCHES: [Arch; 2] = [
    Arch {
        name: "x86_64",
        debian: "amd64",
        target: "x86_64-unknown-linux-gnu",
        machine: 62,
        strip: "x86_64-linux-gnu-strip",
    },
    Arch {
        name: "aarch64",
        debian: "arm64",
        target: arm::TARGET,
        machine: 183,
        strip: "aarch64-linux-gnu-strip",
    },
];

const MAINTAINER: &str = "the fracbit developers";
const HOMEPAGE: &str = "https://github.com/fracbit/fracbit";
const ABOUT: &str = "quantizes and runs large language models";
const DESCRIPTION: [&str; 2] = [
    "fracbit gives every weight matrix of a language model the precision that serves it best within a \
     budget of bits, bytes or time per token, and runs, serves and evaluates the result on an ordinary \
     processor. It reads checkpoints of Hugging Face and GGUF files.",
    "One program serves all processors: the instruction set is chosen when it starts.",
];

/// Shells, where Debian has them look for completions, and the names there.
const SHELLS: [(&str, &str); 3] = [
    ("bash", "usr/share/bash-completion/completions/fracbit"),
    ("zsh", "usr/share/zsh/vendor-completions/_fracbit"),
    ("fish", "usr/share/fish/vendor_completions.d/fracbit.fish"),
];

/// The page of what the library of Rust contains, in a toolchain.
const LIBRARY: &str = "share/doc/rust/COPYRIGHT-library.html";

/// Files of the repository that every archive has.
const DOCS: [&str; 3] = ["README.md", "LICENSE-MIT", "LICENSE-APACHE"];
const UNIT: &str = "fracbit@.service";

/// What every package holds beside its program.
struct Common {
    version: String,
    /// Time of all files, in seconds since 1970.
    epoch: u64,
    /// Files below a folder, with their names there.
    man: Vec<PathBuf>,
    /// Scripts of [`SHELLS`].
    completions: Vec<String>,
    licences: String,
    /// The page of Rust's own library, where the toolchain brings it.
    library: Option<PathBuf>,
}

/// Writes everything into a folder. `binaries` are programs that were built before; without any
/// they are built here, all or that of one architecture.
pub(crate) fn make(dir: &str, binaries: &[&str], only: Option<&str>) -> Outcome {
    let here = std::env::current_dir().map_err(|error| format!("the current directory: {error}"))?;
    let dir = here.join(dir);
    let epoch = epoch()?;
    let given = binaries.iter().map(|path| told(&here.join(path))).collect::<Result<Vec<_>, _>>()?;
    let cross = arm::Toolchain::found();
    let wanted = if given.is_empty() { buildable(cross.is_some(), only)? } else { Vec::new() };
    let targets: Vec<&str> = given.iter().map(|(arch, _)| arch).chain(&wanted).map(|a| a.target).collect();
    let crates = crates::tree(&targets)?;
    let program = crates.iter().find(|krate| krate.name == crates::PACKAGE);
    let version = program.ok_or_else(|| format!("cargo knows no `{}`", crates::PACKAGE))?.version.clone();
    let mut programs = given;
    for arch in wanted {
        programs.push((arch, build(arch, cross.as_ref(), &crates)?));
    }

    let work = Work::new(&dir)?;
    let rust = said("rustc", &["--version"])?;
    let licences = licences::page(&crates, rust.trim())?;
    work.write(&format!("done/fracbit-{version}-third-party.txt"), &licences)?;
    let bill = sbom::document(&crates, &targets, epoch)?;
    sbom::check(&bill)?;
    work.write(&format!("done/fracbit-{version}.cdx.json"), &bill.pretty())?;
    for (arch, program) in &programs {
        strip(*arch, program, &work.path(&format!("programs/{}", arch.name))?)?;
    }
    let common = Common::new(&work, &programs, (version, epoch, licences))?;
    for (arch, _) in &programs {
        common.tarball(&work, *arch)?;
        common.package(&work, *arch)?;
    }
    work.publish(&dir)
}

/// The time of all files: that of the variable that builders agree on, or of the last commit.
fn epoch() -> Result<u64, String> {
    #[expect(clippy::disallowed_methods, reason = "the variable of reproducible builds")]
    let seconds = match std::env::var("SOURCE_DATE_EPOCH") {
        Ok(seconds) => seconds,
        Err(_) => said("git", &["log", "-1", "--format=%ct"])
            .map_err(|error| format!("{error}\n(SOURCE_DATE_EPOCH, in seconds, is the time of the files)"))?,
    };
    let seconds = seconds.trim();
    seconds.parse().map_err(|_| format!("SOURCE_DATE_EPOCH should be a number of seconds, got `{seconds}`"))
}

/// What a program prints.
fn said(program: impl AsRef<OsStr>, args: &[&str]) -> Result<String, String> {
    let name = program.as_ref().display().to_string();
    let out = Command::new(program).args(args).current_dir(root()).output();
    let out = out.map_err(|error| format!("could not start `{name}`: {error}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    Err(format!("`{name} {}`: {}", args.join(" "), String::from_utf8_lossy(&out.stderr).trim()))
}

/// What can be built here, of what is asked for.
fn buildable(cross: bool, only: Option<&str>) -> Result<Vec<Arch>, String> {
    setup::compiler()?;
    let native = |arch: &Arch| arch.name == std::env::consts::ARCH;
    if !ARCHES.iter().any(native) {
        return Err(format!("no release is made on {}", std::env::consts::ARCH));
    }
    if !cross && std::env::consts::ARCH != "aarch64" {
        println!(
            "skipped: aarch64 (rustup target add {}; apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross)",
            arm::TARGET
        );
    }
    let possible = |arch: &Arch| native(arch) || (arch.name == "aarch64" && cross);
    let wanted = |arch: &Arch| only.is_none_or(|only| only == arch.name);
    let arches: Vec<Arch> = ARCHES.into_iter().filter(|arch| possible(arch) && wanted(arch)).collect();
    match only.filter(|_| arches.is_empty()) {
        Some(only) => Err(format!("`--arch {only}` cannot be built here")),
        None => Ok(arches),
    }
}

/// Builds the program without flags and paths of this machine.
fn build(arch: Arch, cross: Option<&arm::Toolchain>, crates: &[Krate]) -> Result<PathBuf, String> {
    let native = arch.name == std::env::consts::ARCH;
    let folder = gpu::target()?.join("dist");
    let mut command = match cross.filter(|_| !native) {
        Some(toolchain) => toolchain.cargo("qemu-aarch64"),
        None => Command::new("cargo"),
    };
    // Sources of others lie side by side.
    let registry = crates.iter().find(|krate| !krate.own).and_then(|krate| krate.folder.parent());
    let remap = |from: &Path, to: &str| format!("--remap-path-prefix={}={to}", from.display());
    let flags = [Some(remap(&root(), "/fracbit")), registry.map(|folder| remap(folder, "/registry"))];
    let flags: Vec<String> = flags.into_iter().flatten().collect();
    let args = ["build", "--release", "--locked", "--package", crates::PACKAGE, "--target", arch.target];
    println!("$ cargo {}", args.join(" "));
    command.args(args).current_dir(root()).env("CARGO_TARGET_DIR", &folder);
    command.env_remove("RUSTFLAGS").env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
    let status = command.status().map_err(|error| format!("could not start cargo: {error}"))?;
    if !status.success() {
        return Err(format!("the program does not build for {}", arch.target));
    }
    Ok(folder.join(arch.target).join("release/fracbit"))
}

/// A program with the architecture that its header tells.
fn told(path: &Path) -> Result<(Arch, PathBuf), String> {
    let bytes = fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let machine = machine(&bytes);
    let arch = ARCHES.into_iter().find(|arch| Some(arch.machine) == machine);
    let arch =
        arch.ok_or_else(|| format!("{}: should be a program for x86-64 or aarch64", path.display()))?;
    Ok((arch, path.to_owned()))
}

/// The machine in the header of a little-endian ELF file of 64 bits.
fn machine(bytes: &[u8]) -> Option<u16> {
    if !bytes.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    Some(u16::from_le_bytes([*bytes.get(18)?, *bytes.get(19)?]))
}

fn strip(arch: Arch, program: &Path, to: &Path) -> Outcome {
    let tool = if arch.name == std::env::consts::ARCH { "strip" } else { arch.strip };
    if !setup::starts(tool) {
        return Err(format!("no `{tool}` found: install binutils for {}", arch.name));
    }
    run(tool, &["--strip-all", "-o", &to.display().to_string(), &program.display().to_string()], &[])
}

impl Common {
    fn new(
        work: &Work,
        programs: &[(Arch, PathBuf)],
        (version, epoch, licences): (String, u64, String),
    ) -> Result<Self, String> {
        // A program prints its own pages; any that runs here will do, under qemu where none does.
        let native = programs.iter().find(|(arch, _)| arch.name == std::env::consts::ARCH);
        let (arch, _) = native.or(programs.first()).ok_or("a release holds a program")?;
        let program = work.path(&format!("programs/{}", arch.name))?.display().to_string();
        let emulator = format!("qemu-{}", arch.name);
        if native.is_none() && !setup::starts(&emulator) {
            return Err(format!(
                "the program prints its pages, and {} does not run here: apt-get install qemu-user",
                arch.name
            ));
        }
        let said = |args: &[&str]| match native {
            Some(_) => said(&program, args),
            None => said(&emulator, &[&[program.as_str()], args].concat()),
        };
        let said_version = said(&["--version"])?;
        if said_version.trim() != format!("fracbit {version}") {
            return Err(format!("the sources are fracbit {version}, the program is {}", said_version.trim()));
        }
        let man = work.path("man")?;
        said(&["man", "-q", "-o", &man.display().to_string()])?;
        let entries = fs::read_dir(&man).map_err(|error| format!("{}: {error}", man.display()))?;
        let mut man: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        man.sort();
        let completions = SHELLS.map(|(shell, _)| said(&["completions", shell]));
        let completions = completions.into_iter().collect::<Result<_, _>>()?;
        let library = Path::new(self::said("rustc", &["--print", "sysroot"])?.trim()).join(LIBRARY);
        let library = Some(library).filter(|path| path.is_file());
        Ok(Self { version, epoch, man, completions, licences, library })
    }

    /// The archive for any system.
    fn tarball(&self, work: &Work, arch: Arch) -> Outcome {
        let stem = format!("fracbit-{}-{}-linux", self.version, arch.name);
        work.copy(&work.path(&format!("programs/{}", arch.name))?, &format!("{stem}/fracbit"))?;
        for name in DOCS.into_iter().chain(["CHANGELOG.md"]) {
            work.copy(&root().join(name), &format!("{stem}/{name}"))?;
        }
        work.write(&format!("{stem}/THIRD-PARTY.txt"), &self.licences)?;
        if let Some(library) = &self.library {
            work.copy(library, &format!("{stem}/rust-library-copyright.html"))?;
        }
        work.copy(&root().join("deploy").join(UNIT), &format!("{stem}/{UNIT}"))?;
        for page in &self.man {
            work.copy(page, &format!("{stem}/man/{}", name_of(page)))?;
        }
        for ((_, path), script) in SHELLS.iter().zip(&self.completions) {
            let name = name_of(Path::new(path));
            let name = if name == "fracbit" { "fracbit.bash".to_owned() } else { name };
            work.write(&format!("{stem}/completions/{name}"), script)?;
        }
        modes(&work.path(&stem)?)?;
        let (mtime, home) = (format!("--mtime=@{}", self.epoch), work.0.display().to_string());
        let archive = work.path(&format!("done/{stem}.tar.gz"))?.display().to_string();
        let same = ["--sort=name", "--format=gnu", "--owner=0", "--group=0", "--numeric-owner", &mtime];
        let rest = ["--use-compress-program=gzip -9n", "-C", &home, "-cf", &archive, &stem];
        run("tar", &[&same[..], &rest].concat(), &[])
    }

    /// The Debian package. Its owners are written without being root.
    fn package(&self, work: &Work, arch: Arch) -> Outcome {
        let stem = format!("fracbit_{}_{}", deb::debian_version(&self.version), arch.debian);
        let program = work.path(&format!("programs/{}", arch.name))?;
        let bytes = fs::read(&program).map_err(|error| format!("{}: {error}", program.display()))?;
        let file = |path: &str| format!("{stem}/{path}");
        let doc = |name: &str| format!("{stem}/usr/share/doc/fracbit/{name}");
        work.copy(&program, &file("usr/bin/fracbit"))?;
        work.copy(&root().join("deploy").join(UNIT), &file(&format!("usr/lib/systemd/system/{UNIT}")))?;
        for ((_, path), script) in SHELLS.iter().zip(&self.completions) {
            work.write(&file(path), script)?;
        }
        let mut packed = Vec::new();
        for page in &self.man {
            packed.push(file(&format!("usr/share/man/man1/{}", name_of(page))));
            work.copy(page, &packed[packed.len() - 1])?;
        }
        work.copy(&root().join("README.md"), &doc("README.md"))?;
        work.copy(&root().join("docs/serving.md"), &doc("serving.md"))?;
        work.write(&doc("copyright"), &copyright()?)?;
        work.copy(&root().join("CHANGELOG.md"), &doc("changelog"))?;
        work.write(&doc("third-party.txt"), &self.licences)?;
        packed.extend(["changelog", "third-party.txt"].map(doc));
        if let Some(library) = &self.library {
            packed.push(doc("rust-library-copyright.html"));
            work.copy(library, &packed[packed.len() - 1])?;
        }
        for name in packed {
            let path = work.path(&name)?.display().to_string();
            said("gzip", &["-9n", &path])?;
        }
        let files = below(&work.path(&stem)?)?;
        let size = |path: &PathBuf| fs::metadata(path).map_or(0, |data| data.len());
        let control = deb::Control {
            version: &self.version,
            architecture: arch.debian,
            maintainer: MAINTAINER,
            homepage: HOMEPAGE,
            description: (ABOUT, &DESCRIPTION),
            program: &bytes,
            bytes: files.iter().map(size).sum(),
        };
        let sums = sums(&work.path(&stem)?, "md5sum", &files)?;
        work.write(&file("DEBIAN/control"), &control.text())?;
        work.write(&file("DEBIAN/md5sums"), &sums)?;
        modes(&work.path(&stem)?)?;
        let tree = work.path(&stem)?;
        let epoch = self.epoch.to_string();
        if !setup::starts("dpkg-deb") {
            let kept = work.path(&format!("done/{stem}"))?;
            println!(
                "skipped: the Debian package; where there is dpkg-deb:\n  SOURCE_DATE_EPOCH={epoch} dpkg-deb --root-owner-group -Zxz --build {stem} {stem}.deb"
            );
            return fs::rename(&tree, &kept).map_err(|error| format!("{}: {error}", kept.display()));
        }
        let package = work.path(&format!("done/{stem}.deb"))?.display().to_string();
        let args = ["--root-owner-group", "-Zxz", "--build", &tree.display().to_string(), &package];
        run("dpkg-deb", &args, &[("SOURCE_DATE_EPOCH", &epoch)])
    }
}

/// Debian's file of licences. Its systems have the text of Apache's.
fn copyright() -> Result<String, String> {
    let path = root().join("LICENSE-MIT");
    let mit = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(format!(
        "fracbit, {HOMEPAGE}\n\nUnder one of two licences, as you like: Apache-2.0, whose text is in\n\
         /usr/share/common-licenses/Apache-2.0, or this one:\n\n{mit}\n\
         What others wrote and the program contains: third-party.txt.gz in this folder.\n"
    ))
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// All files below a folder, in order.
fn below(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let mut files = Vec::new();
    for path in paths {
        if path.is_dir() { files.extend(below(&path)?) } else { files.push(path) }
    }
    Ok(files)
}

/// Gives a folder and all below the rights that they have everywhere, whatever the umask is here.
fn modes(folder: &Path) -> Outcome {
    let set = |path: &Path, mode: u32| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
            .map_err(|error| format!("{}: {error}", path.display()))
    };
    set(folder, 0o755)?;
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            modes(&path)?;
        } else {
            let parent = path.parent().map(name_of).unwrap_or_default();
            let program = name_of(&path) == "fracbit" && parent != "completions";
            set(&path, if program { 0o755 } else { 0o644 })?;
        }
    }
    Ok(())
}

/// Sums of files by a program such as `sha256sum`, with names below `folder`.
fn sums(folder: &Path, program: &str, files: &[PathBuf]) -> Result<String, String> {
    let names = files.iter().map(|path| path.strip_prefix(folder).unwrap_or(path));
    let out = Command::new(program).args(names).current_dir(folder).output();
    let out = out.map_err(|error| format!("could not start `{program}`: {error}"))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    Err(format!("{program}: {}", String::from_utf8_lossy(&out.stderr).trim()))
}

/// A folder for unfinished files, beside the finished ones so that these need only be renamed.
/// It goes whatever happens.
struct Work(PathBuf);

impl Drop for Work {
    fn drop(&mut self) {
        // What stays is named as unfinished, and the next run takes it away.
        let _ = fs::remove_dir_all(&self.0);
    }
}

impl Work {
    fn new(dir: &Path) -> Result<Self, String> {
        let work = Self(dir.join("release.partial"));
        let failed = |error| format!("{}: {error}", work.0.display());
        if work.0.exists() {
            fs::remove_dir_all(&work.0).map_err(failed)?;
        }
        fs::create_dir_all(work.0.join("done")).map_err(failed)?;
        Ok(work)
    }

    /// A path within, whose folder is there.
    fn path(&self, name: &str) -> Result<PathBuf, String> {
        let path = self.0.join(name);
        let folder = path.parent().unwrap_or(&self.0);
        fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(path)
    }

    fn write(&self, name: &str, text: &str) -> Outcome {
        let path = self.path(name)?;
        fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn copy(&self, from: &Path, name: &str) -> Outcome {
        let path = self.path(name)?;
        fs::copy(from, &path).map(drop).map_err(|error| format!("{}: {error}", from.display()))
    }

    /// Gives what is done its names, the sums last: where they are, all is there.
    fn publish(&self, dir: &Path) -> Outcome {
        const SUMS: &str = "SHA256SUMS";
        let done = self.0.join("done");
        let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
        let entries = fs::read_dir(&done).map_err(|error| failed(&done, error))?;
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.sort();
        let files: Vec<PathBuf> = paths.iter().filter(|path| path.is_file()).cloned().collect();
        self.write(&format!("done/{SUMS}"), &sums(&done, "sha256sum", &files)?)?;
        let old = dir.join(SUMS);
        if old.exists() {
            fs::remove_file(&old).map_err(|error| failed(&old, error))?;
        }
        for path in paths.into_iter().chain([done.join(SUMS)]) {
            let name = dir.join(name_of(&path));
            if name.is_dir() {
                fs::remove_dir_all(&name).map_err(|error| failed(&name, error))?;
            }
            fs::rename(&path, &name).map_err(|error| failed(&name, error))?;
            println!("{}", name.display());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_tell_their_machine() {
        let mut header = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\xb7\0".to_vec();
        assert_eq!(machine(&header), Some(183));
        header[18] = 62;
        assert_eq!(machine(&header), Some(62));
        assert_eq!(machine(&header[..19]), None);
        assert_eq!(machine(b"#!/bin/sh\n echo no program at all"), None);
    }

    #[test]
    fn everything_that_the_program_contains_has_a_licence() {
        let targets = ["x86_64-unknown-linux-gnu"];
        let crates = crates::tree(&targets).expect("cargo knows its own lock file");
        let linked = |name: &str| crates.iter().find(|krate| krate.name == name).map(|krate| krate.linked);
        assert_eq!((linked("serde"), linked("serde_derive")), (Some(true), Some(false)));
        assert_eq!(linked("fracbit-kernels-x86"), Some(true));
        assert_eq!(linked("highs"), None, "a feature that is off");
        sbom::check(&sbom::document(&crates, &targets, 0).expect("a document")).expect("a valid one");
        let page = licences::page(&crates, "rustc").expect("a page");
        for krate in crates.iter().filter(|krate| !krate.own) {
            assert!(krate.license.is_some() || krate.license_file.is_some(), "{krate:?}");
            assert!(page.contains(&format!("\n{} {}: ", krate.name, krate.version)), "{}", krate.name);
        }
    }

    #[test]
    fn what_is_done_gets_its_name_and_nothing_else_stays() {
        let dir =
            gpu::target().expect("a target folder").join(format!("release-test-{}", std::process::id()));
        let work = Work::new(&dir).expect("a folder");
        work.write("done/b.txt", "b").expect("a file");
        work.write("done/a.txt", "a").expect("a file");
        work.write("tree/half", "h").expect("a file");
        work.publish(&dir).expect("names");
        drop(work);
        let names: Vec<String> = below(&dir).expect("files").iter().map(|path| name_of(path)).collect();
        assert_eq!(names, ["SHA256SUMS", "a.txt", "b.txt"]);
        let sums = fs::read_to_string(dir.join("SHA256SUMS")).expect("sums");
        assert_eq!(sums.lines().map(|line| &line[64..]).collect::<Vec<_>>(), ["  a.txt", "  b.txt"]);
        fs::remove_dir_all(&dir).expect("the folder goes");
    }
}
