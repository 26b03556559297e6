//! Chat templates: Jinja from the model's files, rendered with limits.
//!
//! Templates are programs written by whoever published the model. They run in minijinja, which reaches neither files nor Python objects,
//! set up as transformers does it (`trim_blocks`, `lstrip_blocks`, `raise_exception`, `strftime_now`, `tojson` without HTML escapes,
//! Python's string methods, `break` and `continue`). The tag `{% generation %}`, which marks what training counts, encloses its text.
//!
//! Limits: [`FUEL`] instructions bound the time; output beyond [`MAX_OUTPUT`] bytes is an error; `format` and `indent` take widths up
//! to [`MAX_WIDTH`] only (a width of 2·10⁹ makes 2 GB from nine characters), `batch` and `slice` up to [`MAX_PIECES`]; `replace` and `join` check the size of their result before
//! they make it. **Not bounded: memory.** A template that doubles a string forty times needs forty instructions and a terabyte,
//! and minijinja has no hook in the operator `~`. Whoever renders templates of unknown origin does it in a process with a memory
//! limit; a template that comes from the *user of a server* should not be rendered at all.

use std::collections::BTreeMap;
use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Serde, Value};
use minijinja::{Environment, ErrorKind, State, filters};

use serde::Serialize;

use crate::error::Error;

/// Most instructions of one rendering.
pub const FUEL: u64 = 500_000;
/// Most bytes of output.
pub const MAX_OUTPUT: usize = 16 << 20;
/// Most bytes of a template.
pub const MAX_TEMPLATE: usize = 1 << 20;
/// Largest width of `format` and `indent`.
pub const MAX_WIDTH: u64 = 256;
/// Largest count of `batch` and `slice`, the limit that minijinja has for `range`.
pub const MAX_PIECES: u64 = 10_000;
const RECURSION: usize = 64;
const NAME: &str = "chat_template";

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or what else the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl Message {
    /// A message.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// What a template may use besides the messages.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions<'a> {
    /// End with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Text of BOS, see [`crate::Tokenizer::bos_token`].
    pub bos_token: Option<&'a str>,
    /// Text of EOS.
    pub eos_token: Option<&'a str>,
    /// The time that `strftime_now` tells, in seconds since 1970, UTC; `None`: the clock. Fix it for reproducible prompts.
    pub now: Option<u64>,
    /// Further variables, such as `enable_thinking`.
    pub extra: BTreeMap<String, serde_json::Value>,
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
}

impl ChatTemplate {
    /// Compiles a template.
    ///
    /// # Errors
    /// [`Error::Template`] with line and reason.
    pub fn new(source: &str) -> Result<Self, Error> {
        if source.len() > MAX_TEMPLATE {
            return Err(Error::Template(format!(
                "should have at most {MAX_TEMPLATE} bytes, has {}",
                source.len()
            )));
        }
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|e| describe(&e))?);
        env.set_fuel(Some(FUEL));
        env.set_recursion_limit(RECURSION);
        // The output is a prompt, not a page.
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        env.set_unknown_method_callback(method);
        env.add_function("raise_exception", |msg: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("the template refuses: {msg}")))
        });
        env.add_filter("tojson", tojson);
        env.add_filter("format", limited(Value::from_function(filters::format), check_format));
        env.add_filter("indent", limited(Value::from_function(filters::indent), check_indent));
        env.add_filter("replace", limited(Value::from_function(filters::replace), check_replace));
        env.add_filter("batch", limited(Value::from_function(filters::batch), check_pieces));
        env.add_filter("slice", limited(Value::from_function(filters::slice), check_pieces));
        env.add_filter("join", limited(Value::from_function(filters::join), check_join));
        env.add_template_owned(NAME, without_generation(source)).map_err(|e| describe(&e))?;
        Ok(Self { env, source: source.to_owned() })
    }

    /// The text of the template.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt of a conversation.
    ///
    /// # Errors
    /// [`Error::Template`] when the template refuses the messages, fails or exceeds a limit.
    pub fn render(&self, messages: &[Message], options: &RenderOptions<'_>) -> Result<String, Error> {
        let mut context: BTreeMap<String, Value> = BTreeMap::new();
        for (name, v) in &options.extra {
            context.insert(name.clone(), Value::from(Serde(v)));
        }
        context.insert("messages".to_owned(), Value::from(Serde(messages)));
        context.insert("add_generation_prompt".to_owned(), options.add_generation_prompt.into());
        context.insert("bos_token".to_owned(), options.bos_token.unwrap_or_default().into());
        context.insert("eos_token".to_owned(), options.eos_token.unwrap_or_default().into());
        let now = options.now;
        let clock = Value::from_function(move |format: String| strftime(&format, now));
        context.insert("strftime_now".to_owned(), clock);
        let template = self.env.get_template(NAME).map_err(|e| describe(&e))?;
        let mut out = Capped(Vec::new());
        template.render_captured_to(Value::from_pairs(context), &mut out).map_err(|e| describe(&e))?;
        String::from_utf8(out.0).map_err(|e| Error::Template(format!("output should be UTF-8: {e}")))
    }
}

/// A writer that refuses to grow beyond the limit.
struct Capped(Vec<u8>);

impl io::Write for Capped {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if self.0.len() + buf.len() > MAX_OUTPUT {
            return Err(io::Error::other(format!("output should have at most {MAX_OUTPUT} bytes")));
        }
        self.0.extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The template with the tags `generation` and `endgeneration`, which only training has a use for, as a condition that holds.
fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let name = tag.trim_start_matches(['-', '+']).trim_start();
        let end = name.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(name.len());
        let (name, after) = name.split_at(end);
        let plain = match name {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => {
                rest = tag;
                continue;
            }
        };
        out.push_str(&tag[..tag.len() - name.len() - after.len()]);
        out.push_str(plain);
        rest = after;
    }
    out + rest
}

fn describe(e: &minijinja::Error) -> Error {
    let mut text = match e.kind() {
        ErrorKind::OutOfFuel => format!("should render within {FUEL} steps"),
        _ => e.to_string(),
    };
    let mut cause = std::error::Error::source(e);
    while let Some(c) = cause {
        text.push_str(": ");
        text.push_str(&c.to_string());
        cause = c.source();
    }
    Error::Template(text)
}

fn refuse(what: impl Into<String>) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, what.into())
}

type Checked = fn(&[Value]) -> Result<(), minijinja::Error>;

/// A built-in filter that looks at its arguments first.
fn limited(
    builtin: Value,
    check: Checked,
) -> impl Fn(&mut State<'_, '_>, Rest<Value>) -> Result<Value, minijinja::Error> + Send + Sync + 'static {
    move |state, args| {
        check(&args.0)?;
        builtin.call(state, &args.0)
    }
}

/// Python's methods, those that can make much from little checked like the filters.
fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, minijinja::Error> {
    let check: Option<Checked> = match name {
        "format" => Some(check_format),
        "replace" => Some(check_replace),
        _ => None,
    };
    if let Some(check) = check {
        let all: Vec<Value> = std::iter::once(value).chain(args).cloned().collect();
        check(&all)?;
    }
    if let ("join", Some(joiner), Some(items)) = (name, value.as_str(), args.first()) {
        check_joined(items, joiner.len())?;
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// Widths and precisions in the format string; those taken from arguments are refused outright.
fn check_format(args: &[Value]) -> Result<(), minijinja::Error> {
    let s = args.first().and_then(Value::as_str).unwrap_or_default();
    let nested = s.split('{').skip(1).any(|field| field.contains(':') && !field.contains('}'));
    if s.contains('*') && s.contains('%') || nested {
        return Err(refuse("format widths should be written out"));
    }
    for run in s.split(|c: char| !c.is_ascii_digit()).filter(|r| !r.is_empty()) {
        if run.parse::<u64>().map_or(true, |n| n > MAX_WIDTH) {
            return Err(refuse(format!("numbers in a format should be at most {MAX_WIDTH}")));
        }
    }
    Ok(())
}

fn check_indent(args: &[Value]) -> Result<(), minijinja::Error> {
    // By name (`indent(width=4)`) minijinja takes no width at all.
    let width = args.get(1).and_then(|v| u64::try_from(v.clone()).ok()).unwrap_or(0);
    if width > MAX_WIDTH {
        return Err(refuse(format!("indent should be at most {MAX_WIDTH}, got {width}")));
    }
    let s = args.first().and_then(Value::as_str).unwrap_or_default();
    let lines = s.bytes().filter(|&b| b == b'\n').count() as u64 + 1;
    check_size(lines * width + s.len() as u64)
}

fn check_pieces(args: &[Value]) -> Result<(), minijinja::Error> {
    let count = args.get(1).and_then(|v| u64::try_from(v.clone()).ok()).unwrap_or(0);
    if count > MAX_PIECES {
        return Err(refuse(format!("batch and slice should make at most {MAX_PIECES} pieces, got {count}")));
    }
    Ok(())
}

fn check_replace(args: &[Value]) -> Result<(), minijinja::Error> {
    let text = |i: usize| args.get(i).and_then(Value::as_str).unwrap_or_default();
    let (s, from, to) = (text(0), text(1), text(2));
    check_size(s.len() as u64 + s.matches(from).count() as u64 * to.len() as u64)
}

fn check_join(args: &[Value]) -> Result<(), minijinja::Error> {
    let by_name = args.last().and_then(|v| Kwargs::try_from(v.clone()).ok());
    let by_name = by_name.and_then(|k| k.peek::<String>("d").ok()).map_or(0, |d| d.len());
    let joiner = args.get(1).and_then(Value::as_str).map_or(by_name, str::len);
    args.first().map_or(Ok(()), |items| check_joined(items, joiner))
}

fn check_joined(items: &Value, joiner: usize) -> Result<(), minijinja::Error> {
    let mut size = 0;
    // What is no list fails in the filter itself, with a better message.
    for item in items.try_iter().into_iter().flatten() {
        size += (joiner + item.as_str().map_or(0, str::len)) as u64;
        check_size(size)?;
    }
    Ok(())
}

fn check_size(bytes: u64) -> Result<(), minijinja::Error> {
    if bytes > MAX_OUTPUT as u64 {
        return Err(refuse(format!("text should have at most {MAX_OUTPUT} bytes")));
    }
    Ok(())
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=indent)`, which is what transformers puts behind this name.
fn tojson(value: &Value, indent: Option<usize>, kwargs: Kwargs) -> Result<Value, minijinja::Error> {
    let indent = match indent {
        Some(n) => Some(n),
        None => kwargs.get::<Option<usize>>("indent")?,
    };
    for other in ["ensure_ascii", "separators", "sort_keys"] {
        // transformers accepts them; the defaults are what templates rely on.
        let _unused = kwargs.get::<Option<Value>>(other)?;
    }
    kwargs.assert_all_used()?;
    let fail = |e: serde_json::Error| refuse(format!("tojson: {e}"));
    let mut out = Capped(Vec::new());
    match indent {
        Some(n) if n as u64 > MAX_WIDTH => {
            return Err(refuse(format!("indent should be at most {MAX_WIDTH}, got {n}")));
        }
        Some(n) => {
            let pad = vec![b' '; n];
            let pretty = serde_json::ser::PrettyFormatter::with_indent(&pad);
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, pretty)).map_err(fail)?;
        }
        None => {
            value
                .serialize(&mut serde_json::Serializer::with_formatter(&mut out, PythonFormatter))
                .map_err(fail)?;
        }
    }
    String::from_utf8(out.0).map(Value::from).map_err(|e| refuse(e.to_string()))
}

/// `", "` and `": "` between items, as Python prints JSON.
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
    }
}

/// The directives that templates use for a date; UTC.
fn strftime(format: &str, now: Option<u64>) -> Result<String, minijinja::Error> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
    let now = now
        .unwrap_or_else(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()))
        // The year 9999; beyond it no format agrees on what to print.
        .min(253_402_300_799);
    let (days, secs) = (now / 86_400, now % 86_400);
    let (year, month, day) = civil(days);
    let (weekday, name) = (DAYS[(days % 7) as usize], MONTHS[(month - 1) as usize]);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        let number = |n: u64, width: usize| if padded { format!("{n:0width$}") } else { n.to_string() };
        out.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100, 2),
            Some('m') => number(month, 2),
            Some('d') => number(day, 2),
            Some('e') => format!("{day:2}"),
            Some('B') => name.to_owned(),
            Some('b') => name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('H') => number(secs / 3600, 2),
            Some('I') => number((secs / 3600 + 11) % 12 + 1, 2),
            Some('p') => if secs < 43_200 { "AM" } else { "PM" }.to_owned(),
            Some('M') => number(secs / 60 % 60, 2),
            Some('S') => number(secs % 60, 2),
            Some('F') => format!("{year}-{month:02}-{day:02}"),
            Some('%') => "%".to_owned(),
            other => {
                let other = other.map_or_else(|| "the end".to_owned(), |c| format!("`{}`", c.escape_debug()));
                return Err(refuse(format!(
                    "strftime_now: directive should be one of YymdeBbAaHIpMSF%, got {other}"
                )));
            }
        });
    }
    Ok(out)
}

/// Year, month, day of a day number since 1970-01-01 (Hinnant, "chrono-compatible low-level date algorithms", `civil_from_days`).
fn civil(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + u64::from(month <= 2), month, doy - (153 * mp + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(civil(0), (1970, 1, 1));
        // Against plain counting over four centuries, leap rules included.
        let (mut y, mut m, mut d) = (1970, 1, 1);
        for days in 0..150_000 {
            assert_eq!(civil(days), (y, m, d));
            let leap = y % 4 == 0 && (y % 100 != 0 || y % 400 == 0);
            let len =
                [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][m as usize - 1];
            (y, m, d) = if d < len {
                (y, m, d + 1)
            } else if m < 12 {
                (y, m + 1, 1)
            } else {
                (y + 1, 1, 1)
            };
        }
        let t = Some(1_721_952_000 + 13 * 3600 + 5 * 60); // Friday 2024-07-26 13:05 UTC
        assert_eq!(strftime("%d %b %Y", t).unwrap(), "26 Jul 2024");
        assert_eq!(strftime("%A %-m/%-d/%y %I:%M %p %%", t).unwrap(), "Friday 7/26/24 01:05 PM %");
        assert!(strftime("%Q", t).is_err() && strftime("%", t).is_err());
        assert!(strftime("%Y", Some(u64::MAX)).is_ok());
    }
}
