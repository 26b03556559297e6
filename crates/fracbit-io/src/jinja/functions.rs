//! Functions that templates call by name.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use super::access::{hashable, no_operand};
use super::eval::{Args, Run};
use super::value::{Dict, Kind, Value};
use super::{Fail, text, time};

/// Most items of `range`, as in Jinja2's sandbox.
const RANGE: usize = 100_000;

impl Run {
    pub(super) fn function(&mut self, name: &str, args: Args) -> Result<Value, Fail> {
        match name {
            "raise_exception" => {
                let [message] = args.bind(name, ["message"])?;
                let message = message.map(|m| text::plain(&m.string())).unwrap_or_default();
                Err(Fail::new(format!("the template refuses: {message}")))
            }
            "strftime_now" => {
                let [format] = args.bind(name, ["format"])?;
                let Some(Value::Text(format)) = format else {
                    return Err(Fail::new("`strftime_now` should get a format"));
                };
                Ok((&*time::strftime(&text::plain(&format), self.now)?).into())
            }
            "range" => {
                let ends = args.bind(name, ["start", "stop", "step"])?;
                let whole = |v: &Value| v.integer().ok_or_else(|| no_operand("range", v));
                let ends = ends.iter().flatten().map(whole).collect::<Result<Vec<_>, _>>()?;
                let (start, stop, step) = match ends[..] {
                    [stop] => (0, stop, 1),
                    [start, stop] => (start, stop, 1),
                    [start, stop, step] => (start, stop, step),
                    _ => return Err(Fail::new("`range` should get a number")),
                };
                if step == 0 {
                    return Err(Fail::new("the step of `range` should not be 0"));
                }
                let (mut at, mut items) = (start, Vec::new());
                while if step > 0 { at < stop } else { at > stop } {
                    if items.len() == RANGE {
                        return Err(Fail::new(format!("`range` should have at most {RANGE} items")));
                    }
                    items.push(Value::Integer(at));
                    at = at.saturating_add(step);
                }
                self.spend(items.len())?;
                Ok(Value::sequence(Kind::Range([start, stop, step]), items))
            }
            "dict" | "namespace" => {
                let mut dict = Dict::default();
                if args.positional.len() > 1 {
                    return Err(Fail::new(format!("`{name}` takes at most 1 argument without a name")));
                }
                match args.positional.into_iter().next() {
                    None => {}
                    Some(Value::Dict(d)) => dict = (*d).clone(),
                    Some(pairs) => {
                        for pair in pairs.items()?.iter() {
                            let pair = pair.items()?;
                            let [key, value] = &pair[..] else {
                                return Err(Fail::new("`dict` should get pairs"));
                            };
                            dict.insert(hashable(key.clone())?, value.clone());
                        }
                    }
                }
                for (key, value) in args.named {
                    dict.insert((&*key).into(), value);
                }
                self.spend(dict.0.len())?;
                if name == "dict" {
                    return Ok(Value::Dict(Rc::new(dict)));
                }
                let hidden = |(key, _): &(Value, Value)| matches!(key, Value::Text(t) if text::plain(t).starts_with('_'));
                if dict.0.iter().any(hidden) {
                    return Err(Fail::new("fields of a namespace should not begin with `_`"));
                }
                let fields = Rc::new(RefCell::new(dict));
                self.namespaces.push(Rc::clone(&fields));
                Ok(Value::Namespace(fields))
            }
            "cycler" if args.named.is_empty() && !args.positional.is_empty() => {
                Ok(Value::Cycler(Rc::new((args.positional.into(), Cell::new(0)))))
            }
            "joiner" => {
                let [separator] = args.bind(name, ["sep"])?;
                Ok(Value::Joiner(Rc::new((separator.unwrap_or_else(|| ", ".into()), Cell::new(false)))))
            }
            _ => Err(Fail::new(format!("`{name}` cannot be called so"))),
        }
    }
}
