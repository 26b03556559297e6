//! Quadratic residues in a finite field GF(p^k), for Paley's constructions.
//!
//! The numbering of the field's elements fixes the order of rows and columns of a Paley matrix and
//! so belongs to the file format: element number e stands for the polynomial Σ dᵢ xⁱ over GF(p)
//! whose coefficients dᵢ are the base-p digits of e, least significant first. The modulus is the
//! monic irreducible polynomial of degree k whose lower coefficients, read as such a number, are
//! smallest. For k = 1 this is plain arithmetic modulo p. Fields are small here (q < 1024), so
//! everything is by enumeration.

/// A field GF(p^k) with its quadratic character tabulated.
pub(crate) struct Field {
    p: usize,
    q: usize,
    /// (q): +1 for a non-zero square, −1 for a non-square, 0 for zero.
    character: Vec<i8>,
}

impl Field {
    /// The field of `q` elements, if `q` is an odd prime power.
    pub(crate) fn new(q: usize) -> Option<Self> {
        let (p, k) = prime_power(q).filter(|&(p, _)| p != 2)?;
        let modulus = smallest_irreducible(p, k);
        let mut character = vec![-1i8; q];
        character[0] = 0;
        for e in 1..q {
            let digits = digits(e, p, k);
            character[number(&remainder(product(&digits, &digits, p), &modulus, p), p)] = 1;
        }
        Some(Self { p, q, character })
    }

    /// χ(a − b) for two elements given by number.
    pub(crate) fn character_of_difference(&self, mut a: usize, mut b: usize) -> i8 {
        debug_assert!(a < self.q && b < self.q, "element numbers {a}, {b} in a field of {}", self.q);
        let (mut difference, mut place) = (0, 1);
        while place < self.q {
            difference += (a % self.p + self.p - b % self.p) % self.p * place;
            (a, b, place) = (a / self.p, b / self.p, place * self.p);
        }
        self.character[difference]
    }
}

/// Whether GF(q) exists and is of odd order.
pub(crate) fn is_odd_prime_power(q: usize) -> bool {
    q % 2 == 1 && prime_power(q).is_some()
}

/// (p, k) with q = p^k, if there are such.
fn prime_power(q: usize) -> Option<(usize, u32)> {
    if q < 2 {
        return None;
    }
    let p = (2..).take_while(|p| p * p <= q).find(|p| q.is_multiple_of(*p)).unwrap_or(q);
    let k = q.ilog(p);
    (p.pow(k) == q).then_some((p, k))
}

/// Base-p digits of `e`, least significant first, `k` of them.
fn digits(mut e: usize, p: usize, k: u32) -> Vec<usize> {
    (0..k)
        .map(|_| {
            let digit = e % p;
            e /= p;
            digit
        })
        .collect()
}

fn number(digits: &[usize], p: usize) -> usize {
    digits.iter().rev().fold(0, |e, &d| e * p + d)
}

fn product(a: &[usize], b: &[usize], p: usize) -> Vec<usize> {
    let mut c = vec![0; a.len() + b.len() - 1];
    for (i, &x) in a.iter().enumerate() {
        for (j, &y) in b.iter().enumerate() {
            c[i + j] = (c[i + j] + x * y) % p;
        }
    }
    c
}

/// `a` modulo the monic polynomial `m`, both least significant first.
fn remainder(mut a: Vec<usize>, m: &[usize], p: usize) -> Vec<usize> {
    let degree = m.len() - 1;
    while a.len() > degree {
        let lead = a.pop().expect("longer than the degree, so not empty");
        let low = a.len() - degree;
        for (x, &c) in a[low..].iter_mut().zip(m) {
            *x = (*x + (p - c) * lead) % p;
        }
    }
    a
}

/// Monic polynomials of degree `k` in the order of their lower coefficients' number.
fn monic(p: usize, k: u32) -> impl Iterator<Item = Vec<usize>> {
    (0..p.pow(k)).map(move |low| {
        let mut m = digits(low, p, k);
        m.push(1);
        m
    })
}

fn smallest_irreducible(p: usize, k: u32) -> Vec<usize> {
    monic(p, k)
        .find(|m| {
            let has_divisor = |d: Vec<usize>| remainder(m.clone(), &d, p).iter().all(|&c| c == 0);
            !(1..=k / 2).flat_map(|degree| monic(p, degree)).any(has_divisor)
        })
        .expect("irreducible polynomials exist for every degree")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prime_powers_are_recognised() {
        let known = [2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 17, 19, 23, 25, 27, 29, 31, 32, 37, 41, 43, 47, 49];
        let found: Vec<_> = (0..50).filter(|&q| prime_power(q).is_some()).collect();
        assert_eq!(found, known);
        assert_eq!(prime_power(343), Some((7, 3)));
        assert_eq!(prime_power(961), Some((31, 2)));
    }

    #[test]
    fn modulus_is_the_smallest() {
        assert_eq!(smallest_irreducible(5, 2), [2, 0, 1], "x^2 + 2");
        assert_eq!(smallest_irreducible(3, 3), [1, 2, 0, 1], "x^3 + 2x + 1");
        assert_eq!(smallest_irreducible(7, 1), [0, 1], "x, so that arithmetic is modulo 7");
    }

    /// Laws that determine the character: half the elements are squares, and Σ_c χ(c)χ(c + d) = −1
    /// for d ≠ 0.
    #[test]
    fn character_is_the_quadratic_one() {
        for q in [3, 5, 7, 9, 11, 25, 27, 49, 81, 121, 125, 243] {
            let field = Field::new(q).expect("a prime power");
            assert_eq!(field.character.iter().map(|&c| i32::from(c)).sum::<i32>(), 0, "q = {q}");
            for d in 1..q {
                let sum: i32 = (0..q)
                    .map(|c| {
                        i32::from(field.character_of_difference(c, 0))
                            * i32::from(field.character_of_difference(c, d))
                    })
                    .sum();
                assert_eq!(sum, -1, "q = {q}, d = {d}");
            }
        }
        for q in [0, 1, 2, 4, 6, 15, 91] {
            assert!(Field::new(q).is_none(), "q = {q}");
        }
    }
}
