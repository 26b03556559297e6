//! From tokens to a tree, by the grammar of Jinja2's parser.

use std::sync::Arc;

use super::Fail;
use super::lexer::{Kind, Token};

/// The name of a macro's parameter, and its default.
pub(super) type Parameter = (Arc<str>, Option<Expr>);

/// An expression.
#[derive(Debug)]
pub(super) enum Expr {
    None,
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(Arc<[u32]>),
    Name(Arc<str>),
    List(Vec<Expr>),
    Tuple(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    /// What follows a value, from left to right.
    Postfix(Box<Expr>, Vec<Postfix>),
    Not(Box<Expr>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    /// Operators of one rank, from left to right.
    Chain(Box<Expr>, Vec<(&'static str, Expr)>),
    Concat(Vec<Expr>),
    And(Vec<Expr>),
    Or(Vec<Expr>),
    Compare(Box<Expr>, Vec<(&'static str, Expr)>),
    /// Condition, value, other value.
    Condition(Box<(Expr, Expr, Option<Expr>)>),
}

#[derive(Debug)]
pub(super) enum Postfix {
    Attribute(Arc<str>),
    Item(Expr),
    Slice(Box<[Option<Expr>; 3]>),
    Call(Arguments),
    Filter(Arc<str>, Arguments),
    Test { name: Arc<str>, arguments: Arguments, negated: bool },
}

#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Expr>,
    pub(super) named: Vec<(Arc<str>, Expr)>,
    /// `*list` and `**dict`.
    pub(super) list: Option<Expr>,
    pub(super) dict: Option<Expr>,
}

/// What a value is given to.
#[derive(Clone, Debug)]
pub(super) enum Target {
    Name(Arc<str>),
    /// A field of a namespace.
    Field(Arc<str>, Arc<str>),
    Tuple(Vec<Target>),
}

#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: Arc<str>,
    pub(super) parameters: Vec<Parameter>,
    pub(super) body: Vec<Statement>,
    /// Whether the body names `varargs`, `kwargs`, `caller`: what it does not name it does not
    /// take.
    pub(super) varargs: bool,
    pub(super) kwargs: bool,
    pub(super) caller: bool,
}

#[derive(Debug)]
pub(super) struct Statement {
    pub(super) line: usize,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    Data(Arc<[u32]>),
    Output(Expr),
    If(Vec<(Expr, Vec<Statement>)>, Vec<Statement>),
    For(Arc<For>),
    Set(Target, Expr),
    SetBlock(Target, Vec<Postfix>, Vec<Statement>),
    Macro(Arc<Macro>),
    /// The macro is what stands between, for `caller`.
    Call(Expr, Arc<Macro>),
    Filter(Vec<Postfix>, Vec<Statement>),
    With(Vec<(Target, Expr)>, Vec<Statement>),
    /// `block` and `generation`: a scope of their own.
    Scope(Vec<Statement>),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct For {
    pub(super) target: Target,
    pub(super) over: Expr,
    pub(super) only: Option<Expr>,
    pub(super) recursive: bool,
    pub(super) body: Vec<Statement>,
    pub(super) otherwise: Vec<Statement>,
}

/// Most blocks and brackets within each other.
const DEPTH: usize = 60;

struct Parser {
    tokens: Vec<Token>,
    at: usize,
    depth: usize,
    loops: usize,
    /// Names that the macro at hand has used.
    used: Vec<Arc<str>>,
}

/// The statements of a template.
pub(super) fn parse(tokens: Vec<Token>) -> Result<Vec<Statement>, Fail> {
    let mut parser = Parser { tokens, at: 0, depth: 0, loops: 0, used: Vec::new() };
    let (body, _) = parser.body(&[])?;
    Ok(body)
}

impl Parser {
    fn token(&self) -> &Kind {
        &self.tokens[self.at].kind
    }

    fn line(&self) -> usize {
        self.tokens[self.at].line
    }

    fn fail(&self, rule: impl Into<String>) -> Fail {
        Fail::at(self.line(), format!("syntax error: {}", rule.into()))
    }

    fn unexpected(&self, wanted: &str) -> Fail {
        let got = match self.token() {
            Kind::Data(_) => "text".to_owned(),
            Kind::VariableBegin => "`{{`".to_owned(),
            Kind::VariableEnd => "`}}`".to_owned(),
            Kind::BlockBegin => "`{%`".to_owned(),
            Kind::BlockEnd => "`%}`".to_owned(),
            Kind::Name(name) => format!("`{name}`"),
            Kind::Text(_) => "a string".to_owned(),
            Kind::Integer(_) | Kind::Float(_) => "a number".to_owned(),
            Kind::Operator(operator) => format!("`{operator}`"),
            Kind::End => "the end".to_owned(),
        };
        self.fail(format!("{wanted} should be here, not {got}"))
    }

    fn next(&mut self) {
        self.at = (self.at + 1).min(self.tokens.len() - 1);
    }

    fn is(&self, operator: &str) -> bool {
        matches!(self.token(), Kind::Operator(o) if *o == operator)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.token(), Kind::Name(n) if **n == *name)
    }

    fn skip(&mut self, operator: &str) -> bool {
        let found = self.is(operator);
        if found {
            self.next();
        }
        found
    }

    fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        if found {
            self.next();
        }
        found
    }

    fn expect(&mut self, operator: &str) -> Result<(), Fail> {
        if self.skip(operator) { Ok(()) } else { Err(self.unexpected(&format!("`{operator}`"))) }
    }

    fn name(&mut self) -> Result<Arc<str>, Fail> {
        let Kind::Name(name) = self.token() else { return Err(self.unexpected("a name")) };
        let name = Arc::clone(name);
        self.next();
        Ok(name)
    }

    fn block_end(&mut self) -> Result<(), Fail> {
        if *self.token() != Kind::BlockEnd {
            return Err(self.unexpected("`%}`"));
        }
        self.next();
        Ok(())
    }

    fn deeper<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T, Fail>) -> Result<T, Fail> {
        if self.depth == DEPTH {
            return Err(self.fail(format!("blocks and brackets should be nested at most {DEPTH} deep")));
        }
        self.depth += 1;
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    /// Statements up to one of the tags `ends`, which is consumed up to its name; at the top up to
    /// the end.
    fn body(&mut self, ends: &[&'static str]) -> Result<(Vec<Statement>, &'static str), Fail> {
        let mut body = Vec::new();
        loop {
            let line = self.line();
            let what = match self.token() {
                Kind::Data(data) => {
                    let what = What::Data(Arc::clone(data));
                    self.next();
                    what
                }
                Kind::VariableBegin => {
                    self.next();
                    let value = self.tuple(true, &[])?;
                    if *self.token() != Kind::VariableEnd {
                        return Err(self.unexpected("`}}`"));
                    }
                    self.next();
                    What::Output(value)
                }
                Kind::BlockBegin => {
                    self.next();
                    let name = self.name()?;
                    if let Some(end) = ends.iter().find(|end| ***end == *name) {
                        return Ok((body, end));
                    }
                    self.deeper(|p| p.statement(&name))?
                }
                Kind::End if ends.is_empty() => return Ok((body, "")),
                _ => {
                    let wanted = ends.iter().map(|end| format!("`{end}`")).collect::<Vec<_>>().join(" or ");
                    return Err(self.unexpected(&wanted));
                }
            };
            body.push(Statement { line, what });
        }
    }

    /// The body of a block, whose first tag ends here and whose last one is `end`.
    fn block(&mut self, end: &'static str) -> Result<Vec<Statement>, Fail> {
        self.block_end()?;
        let (body, _) = self.body(&[end])?;
        Ok(body)
    }

    fn statement(&mut self, tag: &str) -> Result<What, Fail> {
        let what = match tag {
            "if" => return self.condition(),
            "for" => return self.for_loop(),
            "set" => {
                let target = self.target(true)?;
                if self.skip("=") {
                    What::Set(target, self.tuple(true, &[])?)
                } else {
                    let mut filters = Vec::new();
                    while self.skip("|") {
                        filters.push(self.filter()?);
                    }
                    What::SetBlock(target, filters, self.block("endset")?)
                }
            }
            "macro" => {
                let name = self.name()?;
                What::Macro(self.macro_of(name, "endmacro")?)
            }
            "call" => {
                let outer = std::mem::take(&mut self.used);
                let parameters = if self.is("(") { self.parameters()? } else { Vec::new() };
                let call = self.expression()?;
                if !matches!(&call, Expr::Postfix(_, posts) if matches!(posts.last(), Some(Postfix::Call(_))))
                {
                    return Err(self.fail("`call` should have a call"));
                }
                let body = self.macro_body("caller".into(), parameters, "endcall")?;
                self.used.extend(outer);
                What::Call(call, body)
            }
            "filter" => {
                let mut filters = vec![self.filter()?];
                while self.skip("|") {
                    filters.push(self.filter()?);
                }
                What::Filter(filters, self.block("endfilter")?)
            }
            "with" => {
                let mut values = Vec::new();
                while *self.token() != Kind::BlockEnd {
                    if !values.is_empty() {
                        self.expect(",")?;
                    }
                    let target = self.target(false)?;
                    self.expect("=")?;
                    values.push((target, self.expression()?));
                }
                What::With(values, self.block("endwith")?)
            }
            "generation" => What::Scope(self.block("endgeneration")?),
            "block" => {
                let name = self.name()?;
                let body = self.block("endblock")?;
                if self.is_name(&name) {
                    self.next();
                }
                What::Scope(body)
            }
            "break" | "continue" if self.loops == 0 => {
                return Err(self.fail(format!("`{tag}` should be in a loop")));
            }
            "break" => What::Break,
            "continue" => What::Continue,
            "extends" | "include" | "import" | "from" | "autoescape" => {
                return Err(self.fail(format!("`{tag}` is not for chat templates")));
            }
            tag => return Err(self.fail(format!("unknown statement `{tag}`"))),
        };
        self.block_end()?;
        Ok(what)
    }

    fn condition(&mut self) -> Result<What, Fail> {
        let mut branches = Vec::new();
        loop {
            let condition = self.tuple(false, &[])?;
            self.block_end()?;
            let (body, end) = self.body(&["elif", "else", "endif"])?;
            branches.push((condition, body));
            let otherwise = match end {
                "elif" => continue,
                "else" => self.block("endif")?,
                _ => Vec::new(),
            };
            self.block_end()?;
            return Ok(What::If(branches, otherwise));
        }
    }

    fn for_loop(&mut self) -> Result<What, Fail> {
        let target = self.target(false)?;
        if !self.skip_name("in") {
            return Err(self.unexpected("`in`"));
        }
        let over = self.tuple(false, &["recursive"])?;
        let only = if self.skip_name("if") { Some(self.expression()?) } else { None };
        let recursive = self.skip_name("recursive");
        self.block_end()?;
        self.loops += 1;
        let parsed = self.body(&["endfor", "else"]);
        self.loops -= 1;
        let (body, end) = parsed?;
        let otherwise = if end == "else" { self.block("endfor")? } else { Vec::new() };
        self.block_end()?;
        Ok(What::For(Arc::new(For { target, over, only, recursive, body, otherwise })))
    }

    fn macro_of(&mut self, name: Arc<str>, end: &'static str) -> Result<Arc<Macro>, Fail> {
        let outer = std::mem::take(&mut self.used);
        let parameters = self.parameters()?;
        let made = self.macro_body(name, parameters, end)?;
        self.used.extend(outer);
        Ok(made)
    }

    fn macro_body(
        &mut self,
        name: Arc<str>,
        parameters: Vec<Parameter>,
        end: &'static str,
    ) -> Result<Arc<Macro>, Fail> {
        let loops = std::mem::take(&mut self.loops);
        let body = self.block(end);
        self.loops = loops;
        let body = body?;
        let used = |name: &str| self.used.iter().any(|n| **n == *name);
        let (varargs, kwargs, caller) = (used("varargs"), used("kwargs"), used("caller"));
        // What a macro takes is its own matter; other names may be parameters of one around it.
        self.used.retain(|n| !matches!(&**n, "varargs" | "kwargs" | "caller"));
        Ok(Arc::new(Macro { name, parameters, body, varargs, kwargs, caller }))
    }

    fn parameters(&mut self) -> Result<Vec<Parameter>, Fail> {
        self.expect("(")?;
        let mut parameters: Vec<Parameter> = Vec::new();
        while !self.skip(")") {
            if !parameters.is_empty() {
                self.expect(",")?;
            }
            let name = self.name()?;
            let default = if self.skip("=") { Some(self.expression()?) } else { None };
            if default.is_none() && parameters.last().is_some_and(|(_, default)| default.is_some()) {
                return Err(self.fail("a parameter without a value should come before those with one"));
            }
            parameters.push((name, default));
        }
        Ok(parameters)
    }

    fn target(&mut self, field: bool) -> Result<Target, Fail> {
        let mut targets = Vec::new();
        let mut tuple = false;
        loop {
            if self.skip("(") {
                targets.push(self.deeper(|p| p.target(false))?);
                self.expect(")")?;
            } else {
                let name = self.name()?;
                if matches!(&*name, "true" | "false" | "none" | "True" | "False" | "None") {
                    return Err(self.fail(format!("`{name}` should keep its value")));
                }
                targets.push(if field && self.skip(".") {
                    Target::Field(name, self.name()?)
                } else {
                    Target::Name(name)
                });
            }
            if !self.skip(",") {
                break;
            }
            tuple = true;
            if !matches!(self.token(), Kind::Name(n) if &**n != "in") && !self.is("(") {
                break;
            }
        }
        match targets.pop() {
            Some(one) if !tuple => Ok(one),
            last => {
                targets.extend(last);
                Ok(Target::Tuple(targets))
            }
        }
    }

    /// An expression, or a tuple of them without parentheses.
    fn tuple(&mut self, condition: bool, stops: &[&str]) -> Result<Expr, Fail> {
        let one = |p: &mut Self| if condition { p.expression() } else { p.deeper(Self::or) };
        let first = one(self)?;
        if !self.is(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.skip(",") {
            if self.tuple_ends(stops) {
                break;
            }
            items.push(one(self)?);
        }
        Ok(Expr::Tuple(items))
    }

    fn tuple_ends(&self, stops: &[&str]) -> bool {
        matches!(self.token(), Kind::VariableEnd | Kind::BlockEnd | Kind::Operator(")"))
            || self.is_name("in")
            || stops.iter().any(|stop| self.is_name(stop))
    }

    fn expression(&mut self) -> Result<Expr, Fail> {
        self.deeper(|p| {
            let mut value = p.or()?;
            while p.skip_name("if") {
                let condition = p.or()?;
                let otherwise = if p.skip_name("else") { Some(p.expression()?) } else { None };
                value = Expr::Condition(Box::new((condition, value, otherwise)));
                p.chained()?;
            }
            Ok(value)
        })
    }

    /// Conditions that follow each other make the tree deeper, as brackets do.
    fn chained(&mut self) -> Result<(), Fail> {
        if self.is_name("if") {
            Err(self.fail("a condition behind a condition should be in brackets"))
        } else {
            Ok(())
        }
    }

    fn or(&mut self) -> Result<Expr, Fail> {
        let first = self.and()?;
        let mut all = vec![first];
        while self.skip_name("or") {
            all.push(self.and()?);
        }
        Ok(if all.len() > 1 { Expr::Or(all) } else { all.remove(0) })
    }

    fn and(&mut self) -> Result<Expr, Fail> {
        let first = self.not()?;
        let mut all = vec![first];
        while self.skip_name("and") {
            all.push(self.not()?);
        }
        Ok(if all.len() > 1 { Expr::And(all) } else { all.remove(0) })
    }

    fn not(&mut self) -> Result<Expr, Fail> {
        if self.skip_name("not") {
            return Ok(Expr::Not(Box::new(self.deeper(Self::not)?)));
        }
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let operator = match self.token() {
                Kind::Operator(o @ ("==" | "!=" | "<" | "<=" | ">" | ">=")) => o,
                Kind::Name(n) if &**n == "in" => "in",
                Kind::Name(n)
                    if &**n == "not"
                        && matches!(&self.tokens[(self.at + 1).min(self.tokens.len() - 1)].kind, Kind::Name(n) if &**n == "in") =>
                {
                    self.next();
                    "not in"
                }
                _ => break,
            };
            self.next();
            rest.push((operator, self.sum()?));
        }
        Ok(if rest.is_empty() { first } else { Expr::Compare(Box::new(first), rest) })
    }

    fn chain(
        &mut self,
        operators: &[&'static str],
        operand: fn(&mut Self) -> Result<Expr, Fail>,
    ) -> Result<Expr, Fail> {
        let first = operand(self)?;
        let mut rest = Vec::new();
        while let Kind::Operator(found) = *self.token() {
            let Some(operator) = operators.iter().find(|o| **o == found) else { break };
            self.next();
            rest.push((*operator, operand(self)?));
        }
        Ok(if rest.is_empty() { first } else { Expr::Chain(Box::new(first), rest) })
    }

    fn sum(&mut self) -> Result<Expr, Fail> {
        self.chain(&["+", "-"], Self::concat)
    }

    fn concat(&mut self) -> Result<Expr, Fail> {
        let first = self.product()?;
        let mut all = vec![first];
        while self.skip("~") {
            all.push(self.product()?);
        }
        Ok(if all.len() > 1 { Expr::Concat(all) } else { all.remove(0) })
    }

    fn product(&mut self) -> Result<Expr, Fail> {
        self.chain(&["*", "/", "//", "%"], |p| p.chain(&["**"], |p| p.unary(true)))
    }

    fn unary(&mut self, filters: bool) -> Result<Expr, Fail> {
        let value = if self.skip("-") {
            Expr::Negative(Box::new(self.deeper(|p| p.unary(false))?))
        } else if self.skip("+") {
            Expr::Positive(Box::new(self.deeper(|p| p.unary(false))?))
        } else {
            self.primary()?
        };
        let mut posts: Vec<Postfix> = Vec::new();
        loop {
            // Behind a filter or a test there are others and calls only.
            let filtered = matches!(posts.last(), Some(Postfix::Filter(..) | Postfix::Test { .. }));
            if !filtered && self.skip(".") {
                posts.push(match *self.token() {
                    Kind::Integer(i) => {
                        self.next();
                        Postfix::Item(Expr::Integer(i))
                    }
                    _ => Postfix::Attribute(self.name()?),
                });
            } else if !filtered && self.skip("[") {
                posts.push(self.deeper(Self::subscript)?);
            } else if self.is("(") {
                posts.push(Postfix::Call(self.deeper(Self::arguments)?));
            } else if filters && self.skip("|") {
                posts.push(self.filter()?);
            } else if filters && self.skip_name("is") {
                posts.push(self.deeper(Self::test)?);
            } else {
                break;
            }
        }
        Ok(if posts.is_empty() { value } else { Expr::Postfix(Box::new(value), posts) })
    }

    fn filter(&mut self) -> Result<Postfix, Fail> {
        let name = self.dotted()?;
        let arguments = if self.is("(") { self.deeper(Self::arguments)? } else { Arguments::default() };
        Ok(Postfix::Filter(name, arguments))
    }

    fn dotted(&mut self) -> Result<Arc<str>, Fail> {
        let mut name = self.name()?;
        while self.skip(".") {
            name = format!("{name}.{}", self.name()?).into();
        }
        Ok(name)
    }

    fn test(&mut self) -> Result<Postfix, Fail> {
        let negated = self.skip_name("not");
        let name = self.dotted()?;
        let mut arguments = Arguments::default();
        let ends = ["else", "or", "and"].iter().any(|end| self.is_name(end));
        match self.token() {
            Kind::Operator("(") => arguments = self.arguments()?,
            Kind::Name(n) if &**n == "is" => return Err(self.fail("tests should not follow each other")),
            Kind::Name(_) | Kind::Text(_) | Kind::Integer(_) | Kind::Float(_) | Kind::Operator("[" | "{")
                if !ends =>
            {
                arguments.positional.push(self.unary(false)?);
            }
            _ => {}
        }
        Ok(Postfix::Test { name, arguments, negated })
    }

    fn subscript(&mut self) -> Result<Postfix, Fail> {
        let mut parts = [None, None, None];
        let mut part = 0;
        let mut slice = false;
        while !self.skip("]") {
            if self.skip(":") {
                slice = true;
                part += 1;
                if part > 2 {
                    return Err(self.fail("a slice should have at most three parts"));
                }
            } else if parts[part].is_none() {
                parts[part] = Some(self.tuple_in("]")?);
            } else {
                return Err(self.unexpected("`]`"));
            }
        }
        if slice {
            return Ok(Postfix::Slice(Box::new(parts)));
        }
        let [Some(item), ..] = parts else { return Err(self.fail("a subscript should not be empty")) };
        Ok(Postfix::Item(item))
    }

    /// An expression, or a tuple up to `close`.
    fn tuple_in(&mut self, close: &str) -> Result<Expr, Fail> {
        let first = self.expression()?;
        if !self.is(",") {
            return Ok(first);
        }
        let mut items = vec![first];
        while self.skip(",") {
            if self.is(close) {
                break;
            }
            items.push(self.expression()?);
        }
        Ok(Expr::Tuple(items))
    }

    fn arguments(&mut self) -> Result<Arguments, Fail> {
        self.expect("(")?;
        let mut arguments = Arguments::default();
        let mut first = true;
        while !self.skip(")") {
            if !first {
                self.expect(",")?;
                if self.skip(")") {
                    break;
                }
            }
            first = false;
            if self.skip("**") && arguments.dict.is_none() {
                arguments.dict = Some(self.expression()?);
            } else if self.skip("*") && arguments.list.is_none() {
                arguments.list = Some(self.expression()?);
            } else if matches!(self.token(), Kind::Name(_))
                && matches!(self.tokens[(self.at + 1).min(self.tokens.len() - 1)].kind, Kind::Operator("="))
            {
                let name = self.name()?;
                self.next();
                arguments.named.push((name, self.expression()?));
            } else if arguments.named.is_empty() && arguments.list.is_none() && arguments.dict.is_none() {
                arguments.positional.push(self.expression()?);
            } else {
                return Err(self.fail("an argument without a name should come before those with one"));
            }
        }
        Ok(arguments)
    }

    fn primary(&mut self) -> Result<Expr, Fail> {
        let value = match self.token() {
            Kind::Name(name) => match &**name {
                "true" | "True" => Expr::Bool(true),
                "false" | "False" => Expr::Bool(false),
                "none" | "None" => Expr::None,
                _ => {
                    let name = Arc::clone(name);
                    self.used.push(Arc::clone(&name));
                    Expr::Name(name)
                }
            },
            Kind::Integer(i) => Expr::Integer(*i),
            Kind::Float(f) => Expr::Float(*f),
            Kind::Text(_) => {
                let mut all = Vec::new();
                while let Kind::Text(piece) = self.token() {
                    all.extend_from_slice(piece);
                    self.next();
                }
                return Ok(Expr::Text(all.into()));
            }
            Kind::Operator("(") => {
                self.next();
                return self.deeper(|p| {
                    if p.skip(")") {
                        return Ok(Expr::Tuple(Vec::new()));
                    }
                    let value = p.tuple_in(")")?;
                    p.expect(")")?;
                    Ok(value)
                });
            }
            Kind::Operator("[") => {
                self.next();
                return self.deeper(|p| {
                    let mut items = Vec::new();
                    while !p.skip("]") {
                        if !items.is_empty() {
                            p.expect(",")?;
                            if p.skip("]") {
                                break;
                            }
                        }
                        items.push(p.expression()?);
                    }
                    Ok(Expr::List(items))
                });
            }
            Kind::Operator("{") => {
                self.next();
                return self.deeper(|p| {
                    let mut items = Vec::new();
                    while !p.skip("}") {
                        if !items.is_empty() {
                            p.expect(",")?;
                            if p.skip("}") {
                                break;
                            }
                        }
                        let key = p.expression()?;
                        p.expect(":")?;
                        items.push((key, p.expression()?));
                    }
                    Ok(Expr::Dict(items))
                });
            }
            _ => return Err(self.unexpected("a value")),
        };
        self.next();
        Ok(value)
    }
}
