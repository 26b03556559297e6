//! What builds and tests need beside Rust, and how to get it on Debian.

use crate::{Failure, Outcome, root};
use std::{path::Path, process::Command};

/// A Debian package, how to see that it is there, and why it is needed.
struct Need {
    packages: &'static [&'static str],
    present: fn() -> bool,
    why: &'static str,
}

const NEEDS: [Need; 2] = [
    Need {
        packages: &["cmake"],
        present: || starts("cmake"),
        why: "builds HiGHS, the integer-programming solver that bit allocation is compared with",
    },
    Need { packages: &["libclang-dev"], present: has_libclang, why: "lets bindgen read the HiGHS header" },
];

/// Whether there is what the program needs to be built.
pub(crate) fn compiler() -> Outcome {
    for compiler in ["c++", "cc"] {
        if !starts(compiler) {
            return Err(format!(
                "no `{compiler}` found: install a C/C++ compiler (apt-get install build-essential)"
            ));
        }
    }
    Ok(())
}

/// Installs what is missing for the tests when that is allowed, otherwise says the exact command.
pub(crate) fn run() -> Outcome {
    compiler()?;
    let missing: Vec<&Need> = NEEDS.iter().filter(|need| !(need.present)()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    for need in &missing {
        println!("missing: {} ({})", need.packages.join(" "), need.why);
    }
    let packages: Vec<&str> = missing.iter().flat_map(|need| need.packages.iter().copied()).collect();
    install(&packages, None)?;
    match missing.iter().find(|need| !(need.present)()) {
        None => Ok(()),
        Some(need) => Err(format!("{} is still missing after the installation", need.packages.join(" "))),
    }
}

/// Installs Debian packages where that is allowed, otherwise says the exact command. `foreign` is
/// an architecture to add.
pub(crate) fn install(packages: &[&str], foreign: Option<&str>) -> Outcome {
    if !may_install() {
        let add = foreign.map_or(String::new(), |name| format!("sudo dpkg --add-architecture {name} && "));
        return Err(format!(
            "install what is missing with:\n  {add}sudo apt-get update && sudo apt-get install -y --no-install-recommends {}",
            packages.join(" ")
        ));
    }
    let quiet = [("DEBIAN_FRONTEND", "noninteractive")];
    if let Some(name) = foreign {
        crate::run("dpkg", &["--add-architecture", name], &quiet)?;
    }
    crate::run("apt-get", &["update", "-q"], &quiet)?;
    crate::run("apt-get", &[&["install", "-y", "-q", "--no-install-recommends"], packages].concat(), &quiet)
}

/// True when dpkg knows the package as installed.
pub(crate) fn installed(package: &str) -> bool {
    let out =
        Command::new("dpkg-query").args(["--show", "--showformat=${db:Status-Status}", package]).output();
    out.is_ok_and(|out| out.status.success() && out.stdout == b"installed")
}

/// Licences, sources and versions of all dependencies by `deny.toml`. Advisories, which change by
/// themselves, are looked at by hand.
pub(crate) fn dependencies() -> Outcome {
    if !starts("cargo-deny") {
        println!(
            "skipped: licences, sources and versions of dependencies need cargo-deny (cargo install cargo-deny --locked)"
        );
        return Ok(());
    }
    crate::run("cargo", &["deny", "--locked", "check", "licenses", "sources", "bans"], &[])
}

/// Whether the public crates changed since the last release as their versions say.
pub(crate) fn versions() -> Outcome {
    let tag = Command::new("git")
        .args(["describe", "--tags", "--abbrev=0", "--match", "v*"])
        .current_dir(root())
        .output();
    let tag = tag.ok().filter(|out| out.status.success());
    let tag = tag.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
    let check = ["semver-checks", "--workspace", "--default-features", "--baseline-rev"];
    let why = match &tag {
        None => "no tag of a release (`v*`) to compare with",
        Some(_) if !starts("cargo-semver-checks") => "cargo install cargo-semver-checks --locked",
        Some(tag) => return crate::run("cargo", &[&check[..], &[tag]].concat(), &[]),
    };
    let tag = tag.as_deref().unwrap_or("v0.1.0");
    println!("skipped: versions of the public crates: {why} (cargo {} {tag})", check.join(" "));
    Ok(())
}

/// Checks the committed reference checkpoints and logits against their seeded scripts (needs
/// numpy).
pub(crate) fn python_checks() -> Outcome {
    let scripts = ["make_checkpoints.py", "reference.py"].map(|name| format!("tests/reference/{name}"));
    let Some(python) = python_with("numpy", &["numpy==2.2.6"])? else {
        println!(
            "skipped: the reference scripts need numpy (python3 -m venv .venv && .venv/bin/pip install numpy==2.2.6)"
        );
        return Ok(());
    };
    scripts.iter().try_for_each(|script| run_check(&python, script))
}

fn run_check(python: &str, script: &str) -> Outcome {
    crate::run(python, &[script, "--check"], &[])
}

/// Installs what the server is asked with, for a test of the command line that looks for it.
pub(crate) fn clients() {
    const PYTHON: [&str; 5] = [
        "openai==3.57.0",
        "anthropic==2.14.0",
        "langchain-openai==1.7.4",
        "litellm==1.110.2",
        "lm-eval[api]==0.4.13",
    ];
    // Two take seconds to import, and litellm then asks the network for prices.
    const MODULES: &str = "openai, anthropic, langchain_openai; from importlib.metadata import version; \
        version('litellm'), version('lm-eval')";
    // Without a network nothing is installed.
    if !matches!(python_with(MODULES, &PYTHON), Ok(Some(_))) {
        println!(
            "skipped: the clients of OpenAI and Anthropic, LangChain, litellm and lm-eval against `serve` (python3 -m venv .venv && .venv/bin/pip install {})",
            PYTHON.join(" ")
        );
    }
    if !javascript_clients() {
        println!(
            "skipped: the JavaScript clients of OpenAI and Vercel against `serve` (npm install --prefix {NPM_DIR} {})",
            NPM.join(" ")
        );
    }
}

/// Where packages of npm are.
const NPM_DIR: &str = "target/clients";
/// The newest that run with Node.js 20.
const NPM: [&str; 5] = [
    "openai@6.49.0",
    "ai@6.0.325",
    "@ai-sdk/openai@3.0.141",
    "@ai-sdk/openai-compatible@2.0.92",
    "zod@4.6.7",
];

/// Whether the packages of npm are there; they are installed where that is allowed.
fn javascript_clients() -> bool {
    let dir = root().join(NPM_DIR);
    let there = || {
        NPM.iter().all(|package| {
            let Some((name, version)) = package.rsplit_once('@') else { return false };
            let about = dir.join("node_modules").join(name).join("package.json");
            let wanted = format!("\"version\": \"{version}\"");
            std::fs::read_to_string(about).is_ok_and(|about| about.contains(&wanted))
        })
    };
    if !starts("node") {
        return false;
    }
    if there() {
        return true;
    }
    if !may_install() || !starts("npm") {
        return false;
    }
    // Scripts of packages are not run: these have nothing to build.
    let options =
        ["install", "--no-audit", "--no-fund", "--ignore-scripts", "--save-exact", "--prefix", NPM_DIR];
    crate::run("npm", &[options.as_slice(), &NPM].concat(), &[]).is_ok() && there()
}

/// Fetches published chat templates and tokenizers, and what they are compared with, for a test of
/// `fracbit-io` that looks for them.
pub(crate) fn published(more: &[&str]) -> Outcome {
    const PACKAGES: [&str; 4] =
        ["jinja2==3.1.6", "tokenizers==0.23.3", "sentencepiece==0.2.3", "mistral_common==1.13.1"];
    let Some(python) = python_with("jinja2, tokenizers, sentencepiece, mistral_common", &PACKAGES)? else {
        return Err(format!(
            "install what is compared with by:\n  python3 -m venv .venv && .venv/bin/pip install {}",
            PACKAGES.join(" ")
        ));
    };
    const SCRIPT: &str = "crates/fracbit-io/tests/golden/fetch_published.py";
    crate::run(&python, &[&[SCRIPT, "target/published"], more].concat(), &[])
}

/// A Python that has modules: the system's, or a virtual environment that gets their packages here
/// when installing is allowed.
pub(crate) fn python_with(modules: &str, packages: &[&str]) -> Result<Option<String>, Failure> {
    let import = format!("import {modules}");
    let has = |python: &str| {
        Command::new(python).args(["-c", &import]).output().is_ok_and(|out| out.status.success())
    };
    let own = root().join(".venv/bin/python").display().to_string();
    for python in [own.as_str(), "python3"] {
        if has(python) {
            return Ok(Some(python.to_owned()));
        }
    }
    if !may_install() || !starts("python3") {
        return Ok(None);
    }
    if !starts(&own) && crate::run("python3", &["-m", "venv", ".venv"], &[]).is_err() {
        println!("skipped: python3 cannot make a virtual environment here (apt-get install python3-venv)");
        return Ok(None);
    }
    // Of what is compiled then, most is never imported.
    crate::run(&own, &[&["-m", "pip", "install", "-q", "--no-compile"], packages].concat(), &[])?;
    Ok(has(&own).then_some(own))
}

/// Root may install, and so may a CI machine, which says CI=true.
pub(crate) fn may_install() -> bool {
    let id = Command::new("id").arg("-u").output();
    let root = id.is_ok_and(|out| out.stdout.trim_ascii() == b"0");
    #[expect(clippy::disallowed_methods, reason = "CI is the one variable that this tool reads")]
    let ci = std::env::var("CI").is_ok_and(|value| value == "true");
    root || ci
}

pub(crate) fn starts(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|out| out.status.success())
}

fn has_libclang() -> bool {
    let is_lib = |path: &Path| {
        path.file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.starts_with("libclang") && !name.contains("cpp") && name.contains(".so"))
    };
    let mut folders =
        vec!["/usr/lib/x86_64-linux-gnu".into(), "/usr/lib/aarch64-linux-gnu".into(), "/usr/lib64".into()];
    folders.extend((11..=22).map(|version| format!("/usr/lib/llvm-{version}/lib")));
    folders.iter().any(|folder: &String| {
        std::fs::read_dir(folder).is_ok_and(|entries| entries.flatten().any(|entry| is_lib(&entry.path())))
    })
}
